"""Groups of a run: a prompt with its samples, each a list of parts and answers.

A part is what one request sampled under one version of the weights. After an environment's answer, an update
of the weights, a lost engine or a resumed run, a sample continues from its tokens so far.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_rc.records.dataset import PromptRow
from verl_rc.records.episode import Opening, Reply
from verl_rc.records.parts import Answer, Part, Sample, num_sampled
from verl_rc.records.ragged_column import RaggedColumn


@dataclass
class GroupSample:
    """One response of a group, which changes while it grows."""

    number: int
    """Number of its group."""
    index: int
    """Place in the group."""
    prompt: Sequence[int]
    """Token ids."""
    response: Sample
    """So far; once it has ended, as the engine returned it."""
    ended: bool = False
    """Whether the response is complete."""

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled so far."""
        return num_sampled(self.response.parts)

    @property
    def versions(self) -> list[int]:
        """Versions of its parts, in order."""
        return [part.version for part in self.response.parts if isinstance(part, Part)]


@dataclass(frozen=True)
class Scores:
    """Results of the reward function for ``n`` samples, in their order."""

    values: Tensor
    """float32 ``[n]``: with the overlong penalty, if there is one."""
    texts: list[str] = field(default_factory=list)
    """``n`` decoded responses."""
    extras: dict[str, list[object]] = field(default_factory=dict)
    """Further columns of ``n`` plain values, e.g. ``acc``."""
    unpenalised: Tensor | None = None
    """float32 ``[n]``: before the overlong penalty, by which a group may be filtered. None if there is no
    penalty, or the group was decided before a checkpoint."""

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> "Scores":
        """The scores of all their samples, in order. An extra that a part lacks is None there."""
        names = sorted({name for part in parts for name in part.extras})
        return cls(
            torch.cat([part.values for part in parts]),
            [text for part in parts for text in part.texts],
            {
                name: [value for part in parts for value in part.extras.get(name, [None] * len(part.values))]
                for name in names
            },
        )

    def part(self, first: int, end: int) -> "Scores":
        """Return the scores of the samples from ``first`` to before ``end``."""
        rows = slice(first, end)
        return Scores(
            self.values[rows].clone(),
            self.texts[rows],
            {name: column[rows] for name, column in self.extras.items()},
            None if self.unpenalised is None else self.unpenalised[rows].clone(),
        )


@dataclass(frozen=True)
class Group:
    """A prompt with its samples, from admission to its end."""

    number: int
    """Place in the order of admission over the whole life of the run."""
    row: PromptRow
    """The prompt."""
    epoch: int
    """Pass over the data, from 0, that the prompt was drawn in."""
    admitted_for_step: int
    """The step that it is drawn for if nothing is filtered: part of the seeds of its samples."""
    admitted_at: int
    """Version that the engines held when it was admitted."""
    samples: Sequence[GroupSample]
    """``rollout.n`` of them, in the order of their index; with ``remax`` a greedy one comes last."""
    scores: Scores | None = None
    """Scores of its samples. None until all have ended and are scored."""
    is_accepted: bool = False
    """Whether the group is whole, scored and to be trained on."""
    attempt: int = 0
    """Number of restarts after a sample had failed: part of the seeds of its samples."""
    submitted_at: float | None = None
    """Time at which this process submitted its requests, ``time.monotonic`` seconds. None before that."""

    @property
    def is_whole(self) -> bool:
        """Whether all its samples have ended."""
        return all(sample.ended for sample in self.samples)

    @property
    def version(self) -> int:
        """The oldest weights that sampled any of its tokens; those of its admission until it is whole."""
        versions = [version for sample in self.samples for version in sample.versions]
        return min(versions) if versions and self.is_whole else self.admitted_at

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled so far."""
        return sum(sample.num_sampled for sample in self.samples)

    def scored(self, scores: Scores, *, accepted: bool) -> "Group":
        """Return the group with its scores, and whether it is to be trained on.

        Raises ``ValueError`` unless it is whole and has a score for each sample.
        """
        if not self.is_whole or len(scores.values) != len(self.samples):
            raise ValueError(
                f"group {self.number} must be whole and get a score for each of its {len(self.samples)} "
                f"samples, got {len(scores.values)}."
            )
        return replace(self, scores=scores, is_accepted=accepted)

    def opened(self, row: PromptRow) -> "Group":
        """Return the group, not begun, with the prompt that its environment opens with."""
        samples = [replace(sample, prompt=row.prompt_token_ids) for sample in self.samples]
        return replace(self, row=row, samples=samples)

    def first(self, count: int) -> "Group":
        """Return the group with its first ``count`` samples and their scores."""
        scores = None if self.scores is None else self.scores.part(0, count)
        return replace(self, samples=self.samples[:count], scores=scores)


def pack(groups: Sequence[Group]) -> dict[str, Any]:
    """Groups for a checkpoint: two flat tensors for all tokens (8 bytes a token), two for each column of
    sampled tokens, and plain data.

    A sample that has not ended is continued from its parts after the checkpoint. A prompt is saved as the
    index of its row, unless an environment has opened it.
    """
    turns = [turn for group in groups for sample in group.samples for turn in sample.response.parts]
    parts = [turn for turn in turns if isinstance(turn, Part)]
    names = sorted({name for part in parts for name in part.columns})
    columns = {
        name: RaggedColumn.joined(
            [part.columns.get(name) or RaggedColumn.empty(len(part.token_ids)) for part in parts]
        )
        for name in names
    }
    no_log_probs = torch.zeros(0, dtype=torch.float32)
    return {
        "token_ids": torch.cat([torch.zeros(0, dtype=torch.int32), *(turn.token_ids for turn in turns)]),
        "log_probs": torch.cat([no_log_probs, *(part.log_probs for part in parts)]),
        "columns": {
            name: (torch.from_numpy(column.offsets), torch.from_numpy(column.values))
            for name, column in columns.items()
        },
        "groups": [_plain_group(group) for group in groups],
    }


def unpack(packed: dict[str, Any], row_of: Callable[[int], PromptRow]) -> list[Group]:
    """The groups of ``pack``, in order. ``row_of`` returns the prompt of a row's index.

    Raises ``ValueError`` when tokens are left over or missing, a group with scores has a sample that has not
    ended, or a prompt has other tokens now.
    """
    turns = [turn for plain in packed["groups"] for sample in plain["samples"] for turn in sample["turns"]]
    lengths = [length for length, version, *_ in turns if version is not None]
    token_ids = _split(packed["token_ids"], [length for length, *_ in turns])
    log_probs = _split(packed["log_probs"], lengths)
    starts = accumulate(lengths, initial=0)
    columns = {
        name: RaggedColumn(offsets.numpy(), values.numpy())
        for name, (offsets, values) in packed.get("columns", {}).items()
    }

    def turn(length: int, version: int | None, restarts: bool = False) -> Part | Answer:
        if version is None:
            return Answer(next(token_ids), restarts)
        start = next(starts)
        part_columns = {name: column[start : start + length] for name, column in columns.items()}
        return Part(next(token_ids), next(log_probs), version, part_columns)

    return [_group(plain, row_of(plain["row_index"]), turn) for plain in packed["groups"]]


def _split(values: Tensor, lengths: list[int]) -> Iterator[Tensor]:
    """Copies of consecutive parts of a flat tensor."""
    if len(values) != sum(lengths):
        raise ValueError(f"saved groups must have {sum(lengths)} tokens, got {len(values)}.")
    return map(torch.clone, torch.split(values, lengths))


def _plain_group(group: Group) -> dict[str, Any]:
    scores = group.scores
    return {
        "number": group.number,
        "row_index": group.row.row_index,
        "prompt_crc": _crc(group.row),
        "opening": None
        if group.row.opening is None
        else (group.row.prompt_token_ids, asdict(group.row.opening)),
        "epoch": group.epoch,
        "admitted_for_step": group.admitted_for_step,
        "admitted_at": group.admitted_at,
        "attempt": group.attempt,
        "samples": [_plain_sample(sample) for sample in group.samples],
        "scores": None if scores is None else scores.values.tolist(),
        "texts": [] if scores is None else scores.texts,
        "extras": {} if scores is None else scores.extras,
    }


def _plain_sample(sample: GroupSample) -> dict[str, Any]:
    return {
        "turns": [  # an answer of the environment has no version
            (len(turn.token_ids), turn.version)
            if isinstance(turn, Part)
            else (len(turn.token_ids), None, turn.restarts)
            for turn in sample.response.parts
        ],
        "ended": sample.ended,
        "finished": sample.response.finished,
        "replies": [asdict(reply) for reply in sample.response.replies],
        "state": sample.response.state,
        "pictures": sample.response.pictures,
    }


def _crc(row: PromptRow) -> int:
    """Of the tokens and pictures of a prompt."""
    pictures = [] if row.pictures is None else [row.pictures.number]
    return zlib.crc32(np.asarray([*row.prompt_token_ids, *pictures], dtype=np.int64).tobytes())


def _group(plain: dict[str, Any], row: PromptRow, turn: Callable[..., Part | Answer]) -> Group:
    if plain["opening"] is not None:
        prompt_token_ids, opening = plain["opening"]
        row = replace(row, prompt_token_ids=prompt_token_ids, opening=Opening(**opening))
    if plain["prompt_crc"] != _crc(row):
        raise ValueError(
            "a resumed run must give its prompts the tokens and pictures that were sampled from, but those "
            "of row "
            f"{plain['row_index']}, which the checkpoint was sampling, are others now. Restore the data, "
            "data.prompt_key, data.max_prompt_length, data.truncation, data.apply_chat_template_kwargs and "
            "the tokenizer, or start a new run with trainer.resume_mode=disable."
        )
    samples = [
        GroupSample(
            plain["number"],
            index,
            row.prompt_token_ids,
            Sample(
                index,
                [turn(*facts) for facts in sample["turns"]],
                sample["finished"],
                [_reply(reply) for reply in sample["replies"]],
                sample["state"],
                pictures=sample.get("pictures", 0),
            ),
            sample["ended"],
        )
        for index, sample in enumerate(plain["samples"])
    ]
    facts = {name: plain[name] for name in ("number", "epoch", "admitted_for_step", "admitted_at", "attempt")}
    group = Group(row=row, samples=samples, **facts)
    if plain["scores"] is None:
        return group
    values = torch.tensor(plain["scores"], dtype=torch.float32)
    # A group that is scored and not accepted has ended.
    return group.scored(Scores(values, plain["texts"], plain["extras"]), accepted=True)


def _reply(plain: dict[str, Any]) -> Reply:
    opening = plain.get("opening")
    return Reply(**{**plain, "opening": None if opening is None else Opening(**opening)})
