"""Metrics of a step's batch, under the names of verl's dashboards."""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl_rc.algorithm.losses import explained_variance
from verl_rc.algorithm.ppo.train_batch import StepInputs
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.records.batches import CriticBatch, PolicyEvaluations, RolloutBatch


def batch_metrics(inputs: StepInputs, max_response_length: int, max_prompt_length: int) -> dict[str, float]:
    """Scores, rewards, advantages, returns and lengths: mean, max and min; read from the device in one copy.

    Rewards have the KL penalty in them. ``response_length/clip_ratio`` is the share
    of responses that reached ``max_response_length``; the batch may be wider.
    """
    rollouts = inputs.scored.rollouts
    mask = rollouts.response_mask
    lengths, prompts = rollouts.tokens.response_lengths, rollouts.tokens.prompt_lengths
    columns = {
        "critic/score": inputs.scored.scores,
        "critic/rewards": inputs.rewards.sum(dim=-1),
        "critic/advantages": inputs.batch.advantages[mask],
        "critic/returns": inputs.returns[mask],
        "response_length": lengths,
        "prompt_length": prompts,
        "global_seqlen": rollouts.tokens.sequence_lengths,
    }
    if rollouts.num_turns is not None and rollouts.tool_calls is not None:
        columns |= {"num_turns": rollouts.num_turns, "tool_call_counts": rollouts.tool_calls}
    values = _mean_max_min(columns)
    values["response_length/clip_ratio"] = (lengths >= max_response_length).double().mean()
    values["prompt_length/clip_ratio"] = (prompts >= max_prompt_length).double().mean()
    if rollouts.tokens.support_counts is not None:
        values["support/unrecorded_ratio"] = (rollouts.tokens.support_counts[mask] == 0).double().mean()
    if rollouts.tokens.experts_counts is not None:
        values["rollout/routed_fraction"] = (rollouts.tokens.experts_counts[mask] > 0).double().mean()
    values["perf/total_num_tokens"] = rollouts.tokens.sequence_lengths.sum().double()
    return _to_floats(values)


def critic_metrics(batch: CriticBatch) -> dict[str, float]:
    """The critic's values before the update, and the share of the returns' variance that they explain."""
    explained = explained_variance(batch.critic_values, batch.returns, batch.response_mask)
    values = _mean_max_min({"critic/values": batch.critic_values[batch.response_mask]})
    return _to_floats({**values, "critic/vf_explained_var": explained})


def version_metrics(policy_versions: Tensor, response_mask: Tensor, current: int) -> dict[str, float]:
    """Numbers of versions of the weights that sampled a response, and ages of its newest and oldest version.

    ``policy_versions`` and ``response_mask`` are ``[B, R]``, with a token in each row; the trainer holds
    version ``current``.
    """
    newest = policy_versions.masked_fill(~response_mask, torch.iinfo(policy_versions.dtype).min).amax(dim=-1)
    oldest = policy_versions.masked_fill(~response_mask, torch.iinfo(policy_versions.dtype).max).amin(dim=-1)
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
        column = column.double()
        values |= {f"{name}/mean": column.mean(), f"{name}/max": column.max(), f"{name}/min": column.min()}
    return values


def _to_floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    """All numbers in one copy from the device."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def policy_gap_metrics(rollouts: RolloutBatch, evaluations: PolicyEvaluations) -> dict[str, float]:
    """Entropy of the proximal policy, and the distance of its token *probabilities* from the rollout
    policy's; for a run whose actor does not correct."""
    assert evaluations.proximal_log_probs is not None
    assert evaluations.entropies is not None
    mask = rollouts.response_mask
    entropy = float(evaluations.entropies[mask].double().mean())
    return {
        "actor/entropy": entropy,
        **probability_gap(evaluations.proximal_log_probs, rollouts.rollout_log_probs, mask),
    }


def probability_gap(
    train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """``training/rollout_probs_diff_*`` and ``training/rollout_actor_probs_pearson_corr``; one copy from the
    device.

    Arguments are ``[B, T]``, log-probs in nats. Of ``|p_train - p_rollout|`` over the response tokens with
    finite log-probs: mean, largest, population standard deviation; and Pearson's correlation of the two. A
    mean above 0.01 points to the engine's precision. Without any token only ``..._valid`` = 0 is returned;
    where one side is constant, no correlation.
    """
    ratio = LogRatio.from_log_probs(train_log_probs, rollout_log_probs, response_mask)
    train, rollout = (one[ratio.valid].double().exp() for one in (ratio.train, ratio.rollout))
    if not len(train):
        return {"training/rollout_probs_diff_valid": 0.0}
    gap = (train - rollout).abs()
    metrics = {
        "training/rollout_probs_diff_valid": torch.ones_like(gap[0]),
        "training/rollout_probs_diff_mean": gap.mean(),
        "training/rollout_probs_diff_max": gap.max(),
        "training/rollout_probs_diff_std": gap.std(correction=0),
    }
    if train.min() < train.max() and rollout.min() < rollout.max():
        correlation = torch.corrcoef(torch.stack([train, rollout]))[0, 1]
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return _to_floats(metrics)
