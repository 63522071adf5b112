"""Recorded rows as a batch that models can score."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl_rc.records.batches import TokenBatch, left_padded
from verl_rc.records.token_records.token_parquet import read_record, record_files
from verl_rc.records.token_records.token_record import FOLDER, DamagedRecordError, TokenRecord


class NothingToReplayError(ValueError):
    """A run lacks what replays need; the message says which key records it."""


@dataclass(frozen=True)
class RecordedRows:
    """Rows of one record; ``B`` rows, ``R`` positions."""

    step: int
    version: int
    """Weights that sampled most tokens, by the record."""
    trainer_version: int
    """Weights of the trainer before the update of the step."""
    tokens: TokenBatch
    counted: Tensor
    """bool ``[B, R]``: tokens of ``version`` that the policy sampled and whose log-probs are finite."""
    rollout: Tensor
    """float32 ``[B, R]``, nats: log-probs of the engine as recorded."""
    train: Tensor | None
    """float32 ``[B, R]``, nats: those of the trainer; None where the actor corrects."""
    versions: Tensor
    """int64 ``[B, R]``: weights that sampled each token, by the record; -1 where the policy sampled none."""

    @property
    def gap(self) -> float:
        """Root mean square of the log-ratio, nats; 0 where the trainer's log-probs were not recorded."""
        return 0.0 if self.train is None else self.rms(self.train, self.rollout)

    def rms(self, first: Tensor, second: Tensor) -> float:
        """Root mean square of a difference over the counted tokens, nats; 0 without any."""
        difference = (first.double() - second.double())[self.counted]
        return float(difference.square().mean().sqrt()) if len(difference) else 0.0

    def share(self, scores: Tensor) -> float:
        """Share of the gap's variance that the trainer's log-probs less ``scores`` explain; 0 where they were
        not recorded."""
        if self.train is None or not self.counted.any():
            return 0.0
        log_probs = (values.double()[self.counted] for values in (self.train, scores, self.rollout))
        train, computed, rollout = log_probs
        gap, difference = train - rollout, train - computed
        variance = gap.var(correction=0)
        covariance = ((gap - gap.mean()) * (difference - difference.mean())).mean()
        return float(covariance / variance) if variance else 0.0


def read_rows(folder: Path, most_rows: int, first_step: int, last_step: int) -> list[RecordedRows]:
    """Rows of every record that holds ids, steps ascending. Raises ``NothingToReplayError`` without any."""
    records = []
    for step, path in record_files(folder / FOLDER):
        if first_step <= step <= last_step:
            try:
                record = read_record(path, folder)
            except DamagedRecordError:
                continue
            has_ids = record.prompts is not None and "response_ids" in record.tokens
            # Replays score a row as one conversation of text, over the whole vocabulary, by the model's own
            # experts.
            is_text = "restart" not in record.tokens and "pictures" not in record.rows
            is_plain = is_text and not _needs_engine_choices(record)
            if has_ids and len(record.lengths) and is_plain:
                records.append(recorded_rows(record, most_rows))
    if not records:
        raise NothingToReplayError(
            f"{folder} must have token records with ids of prompts and responses, and one conversation a "
            "row: trainer.token_records.enable=True and trainer.token_records.contents=full write them. "
            "Records of a run with top_p, top_k, min_p, router replay or pictures are left out: they hold "
            "neither supports nor experts, and replays read no pictures."
        )
    return records


def _needs_engine_choices(record: TokenRecord) -> bool:
    """Whether the trainer's log-probs depend on choices of the engine: supports of its filter, or experts."""
    facts = record.facts
    top_p, top_k, min_p = (facts.get(name) or 0 for name in ("top_p", "top_k", "min_p"))
    return 0 < top_p < 1 or top_k > 0 or min_p > 0 or bool(facts.get("router_replay"))


def recorded_rows(record: TokenRecord, most_rows: int) -> RecordedRows:
    """At most ``most_rows`` rows of a record; the rows that were drawn at random come first."""
    assert record.prompts is not None, "records without prompts are left out"
    order = np.argsort(record.rows["chosen_by"] != "random", kind="stable")[:most_rows].tolist()
    prompts, prompt_lengths = left_padded([record.prompts[row].tolist() for row in order], pad_token_id=0)

    def padded(name: str, kind: torch.dtype) -> Tensor:
        rows = [torch.tensor(record.tokens[name][record.span(row)], dtype=kind) for row in order]
        return pad_sequence(rows, batch_first=True)

    rollout, mask = padded("rollout_log_prob", torch.float32), padded("response_mask", torch.bool)
    train = padded("old_log_prob", torch.float32) if "old_log_prob" in record.tokens else None
    trainer_version = int(record.facts.get("current_version", record.step - 1))
    versions = (
        padded("version", torch.int64)
        if "version" in record.tokens
        else torch.full_like(mask.long(), trainer_version)
    )
    counted = mask & rollout.isfinite() & (torch.ones_like(mask) if train is None else train.isfinite())
    version = int(versions[counted].mode().values) if counted.any() else trainer_version
    return RecordedRows(
        step=record.step,
        version=version,
        trainer_version=trainer_version,
        tokens=TokenBatch(
            prompts=prompts,
            prompt_lengths=prompt_lengths,
            responses=padded("response_ids", torch.int64),
            response_lengths=torch.from_numpy(record.lengths[order].copy()),
            batch_size=[len(order)],
        ),
        counted=counted & (versions == version),
        rollout=rollout,
        train=train,
        versions=versions.where(mask, -1),
    )


def select_records(
    rows: Sequence[RecordedRows], saved_versions: Sequence[int], most: int = 4
) -> list[RecordedRows]:
    """At most ``most`` records whose weights are on the disk: the first, the newest, and those with the
    largest gaps."""
    usable = [record for record in rows if {record.version, record.trainer_version} <= set(saved_versions)]
    by_gap = sorted(usable, key=lambda record: record.gap, reverse=True)
    by_priority = [*usable[:1], *usable[-1:], *by_gap]
    steps = list(dict.fromkeys(record.step for record in by_priority))[:most]
    return [record for record in usable if record.step in steps]
