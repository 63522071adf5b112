"""The randomly drawn rows of token records as one padded batch."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl_rc.config.algorithms import RatioOptions
from verl_rc.data.token_record import Array, TokenRecord, noise_scale
from verl_rc.insight.run_folder import token_source
from verl_rc.insight.run_folder.records import LARGEST_STEP
from verl_rc.tensor_ops.masked import turn_numbers

_CLIP_OPTIONS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


class NoRecordsError(ValueError):
    """A run has no records that presets could be tried on; the message says which key writes them."""


@dataclass(frozen=True)
class RecordedBatch:
    """Rows of all records, ``B``, padded to the longest; prompts are numbered over all steps."""

    train: Tensor
    """float32 ``[B, T]``, nats: log-probs of the proximal policy."""
    rollout: Tensor
    """float32 ``[B, T]``, nats."""
    mask: Tensor
    """bool ``[B, T]``: tokens that the policy sampled."""
    advantages: Tensor
    """float32 ``[B, T]``."""
    scores: Tensor
    """float32 ``[B]``."""
    prompts: Tensor
    """int64 ``[B]``: the prompt of each row, from 0."""
    gradients: Tensor
    """float64 ``[B, T]``: ``g``, the squared norm of a token's gradient for its logits; 1 where it was not
    recorded."""
    directions: Tensor
    """int64 ``[B, T]``: which logit's bias a token moves, from 0."""
    has_gradients: bool = True
    step_of_row: Sequence[int] = ()
    """``[B]``."""
    clip: RatioOptions | None = None
    """The run's clip of the ratio; None: not known."""
    notes: Sequence[str] = ()
    """Records that were left out, and why; one sentence each."""

    @property
    def num_prompts(self) -> int:
        """Prompts of all steps."""
        return int(self.prompts.max()) + 1

    @property
    def has_turns(self) -> bool:
        """Whether a row has several turns: runs of sampled tokens."""
        return bool((turn_numbers(self.mask) > 0).any())


_NEEDED = ("old_log_prob", "advantage")
"""Fields of a token record."""


def read_batch(
    folder: Path, first_step: int = 0, last_step: int = LARGEST_STEP, only: Container[int] | None = None
) -> RecordedBatch:
    """The randomly drawn rows of every record from ``first_step`` to ``last_step`` that can be read.

    ``only``: steps that may be among them; None: all. Raises ``NoRecordsError`` where there is no such row.
    """
    source = token_source(folder)
    records = [] if source is None else source.records(first_step, last_step)
    records = [record for record in records if only is None or record.step in only]
    if not records:
        raise NoRecordsError(
            f"{folder} must have token records; trainer.token_records.enable=True writes them."
        )
    usable = [record for record in records if all(name in record.tokens for name in _NEEDED)]
    if not any((record.rows["chosen_by"] == "random").any() for record in usable):
        missing = [name for name in _NEEDED if not any(name in record.tokens for record in records)]
        raise NoRecordsError(
            f"the token records of {folder} must hold {' and '.join(_NEEDED)} of rows that were drawn at "
            f"random; they lack {' and '.join(missing) or 'such rows'}. Where an actor of verl_rc corrects "
            "(bypass mode, proximal=interpolate) there are no log-probs of the trainer before the update: "
            "record a few steps with algorithm.rollout_correction.bypass_mode=False."
        )
    notes = [] if source is None else source.notes
    if unusable := len(records) - len(usable):
        notes = [*notes, f"{unusable} token record(s) lack {' or '.join(_NEEDED)} and are left out."]
    return replace(_joined(usable), notes=notes)


def clip_of(settings: Mapping[str, Any]) -> RatioOptions | None:
    """The clip of the ratio in the ``settings`` of a run, by dotted key; None where they do not say, or say
    what is no clip."""
    prefix = "actor_rollout_ref.actor."
    options = {name: settings[key] for name in _CLIP_OPTIONS if (key := prefix + name) in settings}
    try:
        return RatioOptions.model_validate(options) if options else None
    except ValidationError:
        return None


def _joined(records: Sequence[TokenRecord]) -> RecordedBatch:
    rows = [
        (record, index)
        for record in records
        for index in np.flatnonzero(record.rows["chosen_by"] == "random").tolist()
    ]
    numbers: dict[tuple[int, int], int] = {}
    for record, index in rows:
        numbers.setdefault((record.step, int(record.rows["group"][index])), len(numbers))
    scales = {record.step: scale for record in records if (scale := noise_scale(record.tokens)) is not None}
    has_gradients = len(scales) == len(records)
    token_ids = {record.step: _ids(record) for record in records}
    distinct_ids = np.unique(np.concatenate(list(token_ids.values())))
    columns = {
        record.step: {**record.tokens, "direction": np.searchsorted(distinct_ids, token_ids[record.step])}
        for record in records
    }

    def padded(name: str, kind: torch.dtype) -> Tensor:
        values = [columns[record.step][name][record.span(index)] for record, index in rows]
        return pad_sequence([torch.tensor(row, dtype=kind) for row in values], batch_first=True)

    if has_gradients:
        columns = {
            step: {**step_columns, "noise_scale": scales[step]} for step, step_columns in columns.items()
        }
    mask = padded("response_mask", torch.bool)
    gradients = padded("noise_scale", torch.float64).square() if has_gradients else mask.double()
    return RecordedBatch(
        train=padded("old_log_prob", torch.float32),
        rollout=padded("rollout_log_prob", torch.float32),
        mask=mask,
        advantages=padded("advantage", torch.float32),
        scores=torch.tensor(
            [float(record.rows["score"][index]) if "score" in record.rows else 0.0 for record, index in rows]
        ),
        prompts=torch.tensor(
            [numbers[record.step, int(record.rows["group"][index])] for record, index in rows]
        ),
        gradients=gradients,
        directions=padded("direction", torch.int64),
        has_gradients=has_gradients,
        step_of_row=[record.step for record, _ in rows],
    )


def _ids(record: TokenRecord) -> Array:
    """Ids of tokens; their classes where ids were not recorded."""
    tokens = record.tokens
    ids = tokens.get("response_ids", tokens.get("token_class", np.zeros_like(tokens["response_mask"])))
    return ids.astype("int64")
