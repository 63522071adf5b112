"""The padded batch of a step's samples, and the check of the weights that sampled it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_rc.records.batches import FIELDS, RolloutBatch, TokenBatch, left_padded
from verl_rc.records.fingerprints import fingerprints_of_samples
from verl_rc.records.parts import UNKNOWN, Part, Sample, columns_of, num_tokens, num_turns
from verl_rc.records.pictures import Pictures


def build_rollout_batch(
    prompts: Sequence[list[int]],
    group_ids: Sequence[int],
    samples: Sequence[Sample],
    pad_token_id: int,
    *,
    with_tools: bool = False,
    turn_rewards: Sequence[Sequence[float]] | None = None,
    pictures: Sequence[Pictures | None] = (),
) -> RolloutBatch:
    """Join ``B`` prompts (token ids) with their samples, in the same order, padded to the longest of each.

    ``response_mask`` leaves out the tokens of tools' answers. The columns about tools are None unless the run
    has tools. ``turn_rewards`` are the rewards of each sample's turns, in order; turns without one count 0.
    ``pictures`` are those of the prompts; none of them are in the batch where a run has none.
    Raises ``ValueError`` when counts differ, or a log-prob of a sampled token is positive.
    """
    rows = len(samples)
    if len(prompts) != rows or len(group_ids) != rows:
        raise ValueError(f"every request needs exactly one sample: {len(prompts)} requests, {rows} samples.")
    lengths = [num_tokens(sample.parts) for sample in samples]
    shape = rows, max(lengths, default=0)
    responses = torch.full(shape, pad_token_id, dtype=torch.int64)
    log_probs = torch.zeros(shape, dtype=torch.float32)
    versions = torch.full(shape, UNKNOWN, dtype=torch.int64)
    response_mask, restarts = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        start = 0
        for part in sample.parts:
            span = slice(start, start + len(part.token_ids))
            responses[row, span] = part.token_ids.long()
            if isinstance(part, Part):
                log_probs[row, span] = part.log_probs
                versions[row, span] = part.version
                response_mask[row, span] = True
            else:
                restarts[row, start] = part.restarts
            start = span.stop
    # A log-softmax in float32 can end slightly above 0. For NaN rollout correction has a rule.
    bad_rows = (response_mask & (log_probs > 1e-5)).any(dim=-1)
    if bool(bad_rows.any()):
        raise ValueError(
            "the log-prob of a sampled token must be <= 0, which does not hold for rows "
            f"{bad_rows.nonzero()[:5, 0].tolist()} of the rollouts."
        )
    prompt_ids, prompt_lengths = left_padded(list(prompts), pad_token_id)
    tokens = TokenBatch(
        prompts=prompt_ids,
        prompt_lengths=prompt_lengths,
        responses=responses,
        response_lengths=torch.tensor(lengths, dtype=torch.int64),
        restarts=restarts if bool(restarts.any()) else None,
        pictures=torch.tensor([0 if one is None else one.number for one in pictures])
        if any(pictures)
        else None,
        **_columns(samples, shape),
        batch_size=[rows],
    )
    engines = [sample.engine for sample in samples if sample.engine is not None]
    return RolloutBatch(
        tokens=tokens,
        response_mask=response_mask,
        rollout_log_probs=log_probs,
        policy_versions=versions,
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        finished=torch.tensor([sample.finished for sample in samples], dtype=torch.bool),
        fingerprints=fingerprints_of_samples(prompts, samples),
        num_turns=torch.tensor([num_turns(sample.parts) for sample in samples]) if with_tools else None,
        tool_calls=torch.tensor([sample.tool_calls for sample in samples]) if with_tools else None,
        turn_rewards=None if turn_rewards is None else at_turn_ends(turn_rewards, response_mask),
        engines=torch.tensor(engines) if len(engines) == rows else None,
        batch_size=[rows],
    )


def _columns(samples: Sequence[Sample], shape: tuple[int, int]) -> dict[str, Any]:
    """The fields of ``COLUMNS`` that the engine has recorded beside tokens."""
    by_field: dict[str, Tensor] = {}
    recorded = {name for sample in samples for part in sample.parts for name in columns_of(part)}
    for name in recorded:
        counts = torch.zeros(shape, dtype=torch.int64)
        values: list[list[np.ndarray[Any, Any]]] = [[] for _ in samples]
        for row, sample in enumerate(samples):
            start = 0
            for part in sample.parts:
                end = start + len(part.token_ids)
                if (column := columns_of(part).get(name)) is not None:
                    counts[row, start:end] = torch.tensor(column.counts)
                    values[row].append(column.values)
                start = end
        sizes = counts.sum(-1).tolist()
        ids = torch.zeros(len(samples), max(sizes), dtype=FIELDS[f"{name}_ids"][0])
        for row, size, pieces in zip(ids.numpy(), sizes, values, strict=True):
            np.concatenate([row[:0], *pieces], out=row[:size])
        by_field |= {f"{name}_counts": counts, f"{name}_ids": ids}
    return by_field


def at_turn_ends(values: Sequence[Sequence[float]], response_mask: Tensor) -> Tensor:
    """float32 ``[B, R]``: the values of a row's turns, each at the last token of its turn.

    A turn is a run of tokens in ``response_mask``. Raises ``ValueError`` when a row has fewer turns than
    values.
    """
    at_ends = torch.zeros(response_mask.shape, dtype=torch.float32)
    ends = response_mask & ~pad(response_mask[:, 1:], (0, 1))
    for row, row_values in enumerate(values):
        places = ends[row].nonzero()[:, 0]
        if len(row_values) > len(places):
            raise ValueError(
                f"a turn has one reward at most, but row {row} has {len(row_values)} rewards for "
                f"{len(places)} turns."
            )
        at_ends[row, places[: len(row_values)]] = torch.tensor(row_values, dtype=torch.float32)
    return at_ends


def check_versions(rollouts: RolloutBatch, expected_version: int) -> None:
    """Raise ``RuntimeError`` when a token was sampled with weights of another version than
    ``expected_version``."""
    wrong = rollouts.response_mask & (rollouts.policy_versions != expected_version)
    if bool(wrong.any()):
        row = int(wrong.any(dim=-1).nonzero()[0])
        versions = sorted(set(rollouts.policy_versions[wrong].tolist()))
        raise RuntimeError(
            f"every token of this step must come from weight version {expected_version}, but "
            f"{int(wrong.sum())} tokens come from version {versions} (first in row {row}): an engine missed "
            "a weight update."
        )
