"""Making one rollout batch of engine completions, with checks of its log-probs and weight versions."""

from collections.abc import Sequence

import torch

from verl_rc.data.batches import Completions, RolloutBatch, TokenBatch, fingerprints, left_padded, positions_mask


def build_rollout_batch(
    prompts: Sequence[list[int]], group_ids: Sequence[int], completions: Completions, pad_token_id: int
) -> RolloutBatch:
    """Join ``B`` prompts (token ids) with their completions, in the same order.

    ``response_mask`` leaves out the tokens of tool answers.
    Raises ``ValueError`` when counts differ, a response is empty, or a log-prob of a sampled token is positive or NaN.
    """
    rows, width = completions.responses.shape
    if len(prompts) != rows or len(group_ids) != rows:
        raise ValueError(f"every request needs exactly one completion: {len(prompts)} requests, {rows} completions.")
    written, response_mask = positions_mask(completions.response_lengths, width), sampled_mask(completions)
    _refuse_bad_rows("a response needs at least one token", completions.response_lengths < 1)
    # A log-softmax in float32 can end slightly above 0. Negated, so that NaN, which compares False, is bad.
    bad = response_mask & ~(completions.rollout_log_probs <= 1e-5)
    _refuse_bad_rows("the log-prob of a sampled token must be a number <= 0", bad.any(dim=-1))
    prompt_ids, prompt_lengths = left_padded(list(prompts), pad_token_id)
    # Engines pad with 0, which may be a real token of the vocabulary.
    responses = torch.where(written, completions.responses, pad_token_id)
    tokens = TokenBatch(
        prompts=prompt_ids,
        prompt_lengths=prompt_lengths,
        responses=responses,
        response_lengths=completions.response_lengths,
        batch_size=[rows],
    )
    return RolloutBatch(
        tokens=tokens,
        response_mask=response_mask,
        rollout_log_probs=completions.rollout_log_probs,
        policy_versions=completions.policy_versions,
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        finished=completions.finished,
        fingerprints=fingerprints(tokens, response_mask),
        num_turns=completions.num_turns,
        tool_calls=completions.tool_calls,
        batch_size=[rows],
    )


def sampled_mask(completions: Completions) -> torch.Tensor:
    """bool ``[B, R]``: tokens that the policy sampled."""
    if completions.response_mask is not None:
        return completions.response_mask
    return positions_mask(completions.response_lengths, completions.responses.shape[1])


def check_versions(rollouts: RolloutBatch, expected_version: int) -> None:
    """Raise ``RuntimeError`` when a token was sampled with weights of another version than ``expected_version``."""
    wrong = rollouts.response_mask & (rollouts.policy_versions != expected_version)
    if bool(wrong.any()):
        row = int(wrong.any(dim=-1).nonzero()[0])
        found = sorted(set(rollouts.policy_versions[wrong].tolist()))
        raise RuntimeError(
            f"every token of this step must come from weight version {expected_version}, but {int(wrong.sum())} tokens come "
            f"from version {found} (first in row {row}): an engine missed a weight update."
        )


def _refuse_bad_rows(requirement: str, bad: torch.Tensor) -> None:
    if bool(bad.any()):
        raise ValueError(f"{requirement}, which does not hold for rows {bad.nonzero()[:5, 0].tolist()} of the rollouts.")
