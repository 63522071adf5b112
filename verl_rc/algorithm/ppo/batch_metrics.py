"""Metrics of a step's batch, under the names of verl's dashboards."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from verl_rc.algorithm.losses import explained_variance
from verl_rc.algorithm.ppo.train_batch import StepInputs
from verl_rc.records.batches import CriticBatch, PolicyEvaluations, RolloutBatch
from verl_rc.records.ragged import Ragged


def batch_metrics(inputs: StepInputs, max_response_length: int, max_prompt_length: int) -> dict[str, float]:
    """Scores, rewards, advantages, returns and lengths: mean, max and min; read from the device in one copy.

    Rewards have the KL penalty in them. ``response_length/clip_ratio`` is the share
    of responses that reached ``max_response_length``; the batch may be wider.
    """
    rollouts = inputs.scored.rollouts
    mask = rollouts.response_mask
    sampled = slice(None) if bool(mask.all()) else mask
    lengths, prompts = rollouts.response_lengths, rollouts.prompt_lengths
    columns = {
        "critic/score": inputs.scored.scores,
        "critic/rewards": inputs.rewards,
        "critic/advantages": inputs.batch.advantages[sampled],
        "critic/returns": inputs.returns[sampled],
        "response_length": lengths,
        "prompt_length": prompts,
        "global_seqlen": rollouts.sequence_lengths,
    }
    if rollouts.num_turns is not None and rollouts.tool_calls is not None:
        columns |= {"num_turns": rollouts.num_turns, "tool_call_counts": rollouts.tool_calls}
    values = _mean_max_min(columns)
    values["response_length/clip_ratio"] = (lengths >= max_response_length).double().mean()
    values["prompt_length/clip_ratio"] = (prompts >= max_prompt_length).double().mean()
    if rollouts.support_counts is not None:
        values["support/unrecorded_ratio"] = (rollouts.support_counts[mask] == 0).double().mean()
    if rollouts.experts_counts is not None:
        values["rollout/routed_fraction"] = (rollouts.experts_counts[mask] > 0).double().mean()
    values["perf/total_num_tokens"] = rollouts.sequence_lengths.sum().double()
    return _to_floats(values)


def critic_metrics(batch: Ragged[CriticBatch]) -> dict[str, float]:
    """The critic's values before the update, and the share of the returns' variance that they explain."""
    values, mask = batch.critic_values, batch.response_mask
    explained = explained_variance(values[None], batch.returns[None], mask[None])
    return _to_floats(
        {**_mean_max_min({"critic/values": values[mask]}), "critic/vf_explained_var": explained}
    )


def version_metrics(versions: Sequence[Collection[int]], current: int) -> dict[str, float]:
    """Numbers of versions of the weights that sampled a response, and ages of its newest and oldest version.

    ``versions``: for each response those of its tokens; the trainer holds version ``current``.
    """
    newest = torch.tensor([max(of_row) for of_row in versions])
    oldest = torch.tensor([min(of_row) for of_row in versions])
    span = newest - oldest
    values = _mean_max_min(
        {
            "training/off_policy/trajectory_spans": span + 1,
            "training/off_policy/trajectory_staleness": current - newest,
            "training/off_policy/trajectory_staleness_worst": current - oldest,
        }
    )
    partial = (span > 0).double()
    values["fully_async/partial/total_partial_num"] = partial.sum()
    values["fully_async/partial/partial_ratio"] = partial.mean()
    values["fully_async/partial/max_partial_span"] = span.max().double()
    return _to_floats(values)


def _mean_max_min(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for name, column in columns.items():
        smallest, largest = column.aminmax()
        mean = column.sum(dtype=torch.float64) / len(column)
        values |= {f"{name}/mean": mean, f"{name}/max": largest.double(), f"{name}/min": smallest.double()}
    return values


def _to_floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    """All numbers in one copy from the device."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def policy_gap_metrics(
    rollouts: Ragged[RolloutBatch], evaluations: Ragged[PolicyEvaluations]
) -> dict[str, float]:
    """Entropy of the proximal policy, and the distance of its token *probabilities* from the rollout
    policy's; for a run whose actor does not correct."""
    mask = rollouts.response_mask
    total = torch.where(mask, evaluations.entropies, 0.0).sum(dtype=torch.float64)
    return {
        "actor/entropy": float(total / mask.count_nonzero()),
        **probability_gap(evaluations.proximal_log_probs, rollouts.rollout_log_probs, mask),
    }


_AT_ONCE = 1 << 20
"""Tokens whose probabilities in float64 are in memory at once."""


def probability_gap(
    train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """``training/rollout_probs_diff_*`` and ``training/rollout_actor_probs_pearson_corr``; one copy from the
    device.

    Arguments are of one shape, log-probs in nats. Of ``|p_train - p_rollout|`` over the response tokens with
    finite log-probs: mean, largest, population standard deviation; and Pearson's correlation of the two. A
    mean above 0.01 points to the engine's precision. Without any token only ``..._valid`` = 0 is returned;
    where one side is constant, no correlation.
    """
    count, means, products = 0, torch.zeros(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    extremes = list[tuple[Tensor, Tensor]]()
    for columns in zip(
        *(one.flatten().split(_AT_ONCE) for one in (train_log_probs, rollout_log_probs, response_mask)),
        strict=True,
    ):
        train, rollout, mask = columns
        is_valid = mask.bool() & (train - rollout).isfinite()
        if not bool(is_valid.all()):
            train, rollout = train[is_valid], rollout[is_valid]
        if not len(train):
            continue
        train, rollout = train.double().exp(), rollout.double().exp()
        values = torch.stack([train, rollout, (train - rollout).abs()])
        mean = values.mean(dim=-1)
        # Parts are merged by their means and centred products (Chan, Golub and LeVeque 1983).
        total, shift, centred = count + len(train), mean - means, values - mean[:, None]
        products = products + centred @ centred.T + torch.outer(shift, shift) * (count * len(train) / total)
        means, count = means + shift * (len(train) / total), total
        extremes.append((values.amin(dim=-1), values.amax(dim=-1)))
    if not count:
        return {"training/rollout_probs_diff_valid": 0.0}
    smallest, largest = (torch.stack(ends) for ends in zip(*extremes, strict=True))
    metrics = {
        "training/rollout_probs_diff_valid": torch.ones_like(means[2]),
        "training/rollout_probs_diff_mean": means[2],
        "training/rollout_probs_diff_max": largest[:, 2].amax(),
        "training/rollout_probs_diff_std": (products[2, 2] / count).sqrt(),
    }
    if bool((smallest.amin(dim=0) < largest.amax(dim=0))[:2].all()):
        correlation = products[0, 1] / (products[0, 0].sqrt() * products[1, 1].sqrt())
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation.clamp(-1, 1)
    return _to_floats(metrics)
