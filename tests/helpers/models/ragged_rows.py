"""Rows of padded records without their padding, and back."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_rc.algorithm.ppo.train_batch import StepInputs, build_train_batch, critic_batch
from verl_rc.records.batches import (
    COLUMNS,
    FIELDS,
    CriticBatch,
    PolicyEvaluations,
    TokenBatch,
    positions_mask,
)
from verl_rc.records.pictures import Pictures
from verl_rc.records.ragged import Column, Ragged
from verl_rc.records.scored_batch import ScoredBatch


def ragged(record: Any, rows: Sequence[int] | None = None, lengths: Any = None) -> Ragged[Any]:
    """``rows`` (default: all) of a padded record; without tokens of its own it has the ``lengths`` of another
    one."""
    tokens = record if isinstance(record, TokenBatch) else getattr(record, "tokens", None)
    index = torch.arange(len(record)) if rows is None else torch.tensor(rows)
    if tokens is not None:
        lengths = {"BP": tokens.prompt_lengths.numpy(), "BR": tokens.response_lengths.numpy()}
        for name, symbols in COLUMNS.items():
            if (counts := getattr(tokens, f"{name}_counts")) is not None:
                lengths[symbols] = counts.sum(-1).numpy()
    columns: dict[str, Column] = {}
    arrays: dict[int, Column] = {}
    for owner in (record,) if tokens is None else (tokens, record):
        for name in (field.name for field in fields(owner) if field.name in FIELDS):
            values: Tensor | None = getattr(owner, name)
            if values is not None:
                symbols = FIELDS[name][1]
                if id(values) not in arrays:
                    own = lengths.get(symbols[:2])
                    arrays[id(values)] = (
                        values.numpy() if own is None else _real(values.numpy(), own, symbols == "BP")
                    )
                columns[name] = arrays[id(values)]
    numbers = set(columns["pictures"].tolist()) - {0} if "pictures" in columns else set()
    whole = Ragged(type(record), columns, lengths, tuple(map(Pictures.known, sorted(numbers))))
    return whole if rows is None else whole.take(index.tolist())


def _real(values: Column, lengths: Column, on_the_right: bool) -> Column:
    width = values.shape[1]
    rows = [
        row[width - length :] if on_the_right else row[:length]
        for row, length in zip(values, lengths.tolist(), strict=True)
    ]
    return np.concatenate(rows, dtype=np.int32 if values.dtype == np.int64 else None)


def whole(rows: Ragged[Any]) -> Any:
    """All rows, padded."""
    return rows.padded(range(len(rows)))


def without_padding(
    scored: ScoredBatch, evaluations: PolicyEvaluations
) -> tuple[ScoredBatch, Ragged[PolicyEvaluations]]:
    """A step's samples, whose rollouts are padded, and their evaluations as the driver has them."""
    rollouts = ragged(scored.rollouts)
    return replace(scored, rollouts=rollouts), ragged(evaluations, lengths=rollouts.lengths)


def padded_step_of(
    scored: ScoredBatch, evaluations: PolicyEvaluations, *arguments: Any, **options: Any
) -> Any:
    """``build_train_batch`` between padded records."""
    return padded_step(build_train_batch(*without_padding(scored, evaluations), *arguments, **options))


def padded_step(step: StepInputs) -> Any:
    """The inputs of a step with padded batch, correction and returns."""
    rows = step.batch
    correction = step.correction
    if correction is not None:
        every = range(len(rows))
        correction = replace(
            correction,
            weights=rows.pad(correction.weights, every),
            keep_mask=rows.pad(correction.keep_mask, every),
        )
    returns = rows.pad(step.returns, range(len(rows)))
    return replace(step, batch=whole(rows), returns=returns, correction=correction)


def padded_critic_batch(step: Any) -> CriticBatch:
    """``critic_batch`` of a step of ``padded_step_of``."""
    is_real = positions_mask(step.batch.tokens.response_lengths, step.returns.shape[1])
    return whole(critic_batch(replace(step, batch=ragged(step.batch), returns=step.returns[is_real])))
