"""What a step's batch looks like, under the names verl's dashboards use."""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl_rc.correction import probability_gap
from verl_rc.data.batches import CriticBatch, PolicyEvaluations, RolloutBatch, TrainBatch
from verl_rc.losses import explained_variance


def batch_metrics(
    batch: TrainBatch, scores: Tensor, rewards: Tensor, rollouts: RolloutBatch, max_response_length: int, max_prompt_length: int
) -> dict[str, float]:
    """Scores, rewards, advantages, returns and lengths: mean, max and min; read from the device in one copy.

    ``scores`` are ``[B]``, ``rewards`` ``[B, R]`` with the KL penalty in them. ``response_length/clip_ratio`` is the share of
    responses that reached ``max_response_length``, whatever the batch's width.
    """
    mask = batch.response_mask
    lengths, prompts = rollouts.tokens.response_lengths, rollouts.tokens.prompt_lengths
    columns = {
        "critic/score": scores,
        "critic/rewards": rewards.sum(dim=-1),
        "critic/advantages": batch.advantages[mask],
        "critic/returns": batch.returns[mask],
        "response_length": lengths,
        "prompt_length": prompts,
        "global_seqlen": rollouts.tokens.sequence_lengths,
    }
    if rollouts.num_turns is not None and rollouts.tool_calls is not None:
        columns |= {"num_turns": rollouts.num_turns, "tool_call_counts": rollouts.tool_calls}
    values = _spreads(columns)
    values["response_length/clip_ratio"] = (lengths >= max_response_length).double().mean()
    values["prompt_length/clip_ratio"] = (prompts >= max_prompt_length).double().mean()
    values["perf/total_num_tokens"] = rollouts.tokens.sequence_lengths.sum().double()
    return _read(values)


def critic_metrics(batch: CriticBatch) -> dict[str, float]:
    """The critic's values before the update, and the share of the returns' variance that they explain."""
    explained = explained_variance(batch.old_values, batch.returns, batch.response_mask).fraction()
    return _read({**_spreads({"critic/values": batch.old_values[batch.response_mask]}), "critic/vf_explained_var": explained})


def _spreads(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for name, column in columns.items():
        column = column.double()
        values |= {f"{name}/mean": column.mean(), f"{name}/max": column.max(), f"{name}/min": column.min()}
    return values


def _read(values: Mapping[str, Tensor]) -> dict[str, float]:
    """All numbers in one copy from the device."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def policy_gap_metrics(rollouts: RolloutBatch, evaluations: PolicyEvaluations) -> dict[str, float]:
    """Entropy of the proximal policy, and how far its token *probabilities* lie from the rollout policy's.

    Nothing in bypass mode, where no proximal policy is computed.
    """
    if evaluations.entropys is None:
        return {}
    mask = rollouts.response_mask
    entropy = float(evaluations.entropys[mask].double().mean())
    return {"actor/entropy": entropy, **probability_gap(evaluations.old_log_probs, rollouts.rollout_log_probs, mask)}
