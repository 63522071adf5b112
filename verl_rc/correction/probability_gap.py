"""How far the two policies' probabilities of the sampled tokens lie apart: a check of the engine's precision."""

import torch
from torch import Tensor

from verl_rc.correction.chunks import RowChunks
from verl_rc.correction.log_ratio import LogProbs, LogRatio


def probability_gap(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """``training/rollout_probs_diff_*`` and ``training/rollout_actor_probs_pearson_corr``; one copy from the device.

    Arguments are ``[B, T]``, log-probs in nats. Of ``|p_train - p_rollout|`` over the response tokens with finite log-probs:
    mean, largest, population standard deviation; and Pearson's correlation of the two. A mean above 0.01 points to the
    engine's precision. Without any token only ``..._valid`` = 0 is returned; where one side is constant, no correlation.
    """
    log_probs = LogProbs(train_log_probs, rollout_log_probs, response_mask)
    parts, largest = [], []
    with torch.no_grad():
        for chunk in RowChunks.of(response_mask):
            sums, maximum = _sums(log_probs.ratio(chunk))
            parts.append(sums)
            largest.append(maximum)
    total = torch.cat([torch.stack(parts).sum(dim=0), torch.stack(largest).amax()[None]])
    count, gap, gap_square, p, q, pp, qq, pq, top = total.tolist()
    if not count:
        return {"training/rollout_probs_diff_valid": 0.0}
    metrics = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_mean": gap / count,
        "training/rollout_probs_diff_max": top,
        "training/rollout_probs_diff_std": max(gap_square / count - (gap / count) ** 2, 0.0) ** 0.5,
    }
    spread = (pp - p * p / count) * (qq - q * q / count)
    if spread > 0:
        metrics["training/rollout_actor_probs_pearson_corr"] = (pq - p * q / count) / spread**0.5
    return metrics


def _sums(ratio: LogRatio) -> tuple[Tensor, Tensor]:
    """Count, sums and sums of products of one chunk, float64 ``[8]``, and its largest difference."""
    log_train = ratio.train.double()
    train, rollout = log_train.exp() * ratio.ones, (log_train - ratio.values).exp_() * ratio.ones
    gap = (train - rollout).abs_()
    columns = (ratio.valid.double(), gap, gap.square(), train, rollout, train.square(), rollout.square(), train * rollout)
    return torch.stack([column.sum() for column in columns]), gap.amax() if gap.numel() else gap.new_zeros(())
