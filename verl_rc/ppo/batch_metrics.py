"""What a step's batch looks like, under the names verl's dashboards use."""

import torch
from torch import Tensor

from verl_rc.data.batches import PolicyEvaluations, RolloutBatch, TrainBatch


def batch_metrics(
    batch: TrainBatch, scores: Tensor, rollouts: RolloutBatch, max_response_length: int, max_prompt_length: int
) -> dict[str, float]:
    """Scores, advantages, returns and lengths: mean, max and min; read from the device in one copy.

    ``response_length/clip_ratio`` is the share of responses that reached ``max_response_length``, whatever the
    batch's width.
    """
    mask = batch.response_mask
    lengths, prompts = rollouts.tokens.response_lengths, rollouts.tokens.prompt_lengths
    columns = {
        "critic/score": scores,
        "critic/rewards": scores,
        "critic/advantages": batch.advantages[mask],
        "critic/returns": batch.returns[mask],
        "response_length": lengths,
        "prompt_length": prompts,
        "global_seqlen": rollouts.tokens.sequence_lengths,
    }
    values: dict[str, Tensor] = {}
    for name, column in columns.items():
        column = column.double()
        values |= {f"{name}/mean": column.mean(), f"{name}/max": column.max(), f"{name}/min": column.min()}
    values["response_length/clip_ratio"] = (lengths >= max_response_length).double().mean()
    values["prompt_length/clip_ratio"] = (prompts >= max_prompt_length).double().mean()
    values["perf/total_num_tokens"] = rollouts.tokens.sequence_lengths.sum().double()
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def policy_gap_metrics(rollouts: RolloutBatch, evaluations: PolicyEvaluations) -> dict[str, float]:
    """Entropy of the proximal policy, and how far its token *probabilities* lie from the rollout policy's."""
    mask = rollouts.response_mask
    proximal = evaluations.old_log_probs[mask].double().exp()
    sampled = rollouts.rollout_log_probs[mask].double().exp()
    difference = (proximal - sampled).abs()
    centred = torch.stack([proximal - proximal.mean(), sampled - sampled.mean()])
    covariance = centred @ centred.T
    correlation = covariance[0, 1] / (covariance[0, 0] * covariance[1, 1]).sqrt().clamp_min(1e-30)
    values = {
        "actor/entropy": evaluations.entropys[mask].double().mean(),
        "training/rollout_probs_diff_max": difference.max(),
        "training/rollout_probs_diff_mean": difference.mean(),
        "training/rollout_probs_diff_std": difference.std(correction=0),
        "training/rollout_actor_probs_pearson_corr": correlation,
    }
    numbers = dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
    return {**numbers, "training/rollout_probs_diff_valid": 1.0}
