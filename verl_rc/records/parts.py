"""Samples and their parts: tokens that one request sampled under one version of the weights, and answers of
the environment between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor

from verl_rc.records.episode import TOOL_CALLS, Reply
from verl_rc.records.ragged_column import RaggedColumn

UNKNOWN = -1
"""The version of weights that no update brought."""


@dataclass(frozen=True)
class Part:
    """Tokens that one request sampled under one version of the weights."""

    token_ids: Tensor
    """int32 ``[T]``, at least one."""
    log_probs: Tensor
    """float32 ``[T]``: of each token under the distribution it was sampled from, nats."""
    version: int
    """Training steps done when those weights were published; ``UNKNOWN`` where no update has come yet."""
    columns: Mapping[str, RaggedColumn] = field(default_factory=dict)
    """Lists that the engine recorded beside each token, by name in ``COLUMNS``."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` naming what does not fit."""
        _check_tokens("Part.token_ids", self.token_ids, torch.int32)
        _check_tokens("Part.log_probs", self.log_probs, torch.float32)
        if len(self.token_ids) != len(self.log_probs) or self.version < UNKNOWN:
            raise ValueError(
                f"a Part must have a log-prob for every token and a version >= {UNKNOWN}, got "
                f"{len(self.token_ids)} tokens, {len(self.log_probs)} log-probs and version {self.version}."
            )
        for name, column in self.columns.items():
            if len(column) != len(self.token_ids):
                raise ValueError(
                    f"Part.columns[{name!r}] must have a list for each of {len(self.token_ids)} tokens, got "
                    f"{len(column)}."
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as bytes: pickle takes 0.5 ms for a tensor, and a step has thousands of parts."""
        token_ids, log_probs = _as_bytes(self.token_ids), _as_bytes(self.log_probs)
        return _part_from_bytes, (token_ids, log_probs, self.version, self.columns)


@dataclass(frozen=True)
class Answer:
    """Tokens of the environment between two turns of the policy."""

    token_ids: Tensor
    """int32 ``[T]``, at least one."""
    restarts: bool = False
    """Whether these tokens begin another conversation: the next turn does not see the tokens before them."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` naming what does not fit."""
        _check_tokens("Answer.token_ids", self.token_ids, torch.int32)

    def __reduce__(self) -> tuple[Any, ...]:
        """See ``Part``."""
        return _answer_from_bytes, (_as_bytes(self.token_ids), self.restarts)


@dataclass(frozen=True)
class Sample:
    """The result of a request to an engine: a response that has ended, or one that is still growing."""

    number: int
    """Number of the request."""
    parts: Sequence[Part | Answer] = ()
    """The response, in order."""
    finished: bool = False
    """Ended by a stop token (False: cut off at a limit, or still growing)."""
    replies: Sequence[Reply] = ()
    """The environment's reply to each turn that has ended."""
    state: bytes | None = None
    """State of the environment after the last reply."""
    engine: int | None = None
    """Number of the engine. None if the run has one, or the sample comes from a checkpoint."""
    pictures: int = 0
    """Number of the pictures that the engine read, see ``Pictures``; 0 for none."""

    @property
    def tool_calls(self) -> int:
        """Calls that tools answered."""
        return int(sum(reply.metrics.get(TOOL_CALLS, 0) for reply in self.replies))


def num_tokens(parts: Sequence[Part | Answer]) -> int:
    """Tokens of a response, with those of the environment."""
    return sum(len(part.token_ids) for part in parts)


def num_sampled(parts: Sequence[Part | Answer]) -> int:
    """Tokens of a response that the policy sampled."""
    return sum(len(part.token_ids) for part in parts if isinstance(part, Part))


def token_ids(parts: Sequence[Part | Answer]) -> list[int]:
    """The tokens of a response."""
    return [token for part in parts for token in part.token_ids.tolist()]


def columns_of(part: Part | Answer) -> Mapping[str, RaggedColumn]:
    """The lists recorded beside tokens; none beside the environment's."""
    return part.columns if isinstance(part, Part) else {}


def context(prompt: Sequence[int], parts: Sequence[Part | Answer]) -> list[int]:
    """The tokens that the next sampled token sees: all since the last conversation began."""
    begins = [place for place, part in enumerate(parts) if isinstance(part, Answer) and part.restarts]
    return token_ids(parts[begins[-1] :]) if begins else [*prompt, *token_ids(parts)]


def num_since_sampled(prompt: Sequence[int], parts: Sequence[Part | Answer]) -> int:
    """Tokens of ``context`` from the last sampled one on; all of them where none was sampled."""
    num_answered = 0
    for part in reversed(parts):
        if isinstance(part, Part):
            return num_answered + 1
        num_answered += len(part.token_ids)
        if part.restarts:
            return num_answered
    return len(prompt) + num_answered


def num_answers(parts: Sequence[Part | Answer]) -> int:
    """Number of answers of the environment: one for all messages after a turn."""
    return sum(isinstance(part, Answer) for part in parts)


def last_turn(parts: Sequence[Part | Answer]) -> list[Part]:
    """The parts sampled after the last answer of the environment."""
    turn = list(takewhile(lambda part: isinstance(part, Part), reversed(parts)))
    return [part for part in reversed(turn) if isinstance(part, Part)]


def num_turns(parts: Sequence[Part | Answer]) -> int:
    """Number of messages of a conversation: the prompt, the policy's turns and the answers. Consecutive parts
    are one turn."""
    return 1 + sum(is_turn for is_turn, _ in runs(parts)) + num_answers(parts)


def runs(parts: Sequence[Part | Answer]) -> list[tuple[bool, list[Part | Answer]]]:
    """Consecutive parts of one kind together: a turn of the policy (True), or the answers after it."""
    return [(is_turn, list(run)) for is_turn, run in groupby(parts, lambda part: isinstance(part, Part))]


def _as_bytes(values: Tensor) -> bytes:
    return values.numpy().tobytes()


def _part_from_bytes(
    token_ids: bytes, log_probs: bytes, version: int, columns: Mapping[str, RaggedColumn]
) -> Part:
    return Part(
        torch.frombuffer(bytearray(token_ids), dtype=torch.int32),
        torch.frombuffer(bytearray(log_probs), dtype=torch.float32),
        version,
        columns,
    )


def _answer_from_bytes(token_ids: bytes, restarts: bool) -> Answer:
    return Answer(torch.frombuffer(bytearray(token_ids), dtype=torch.int32), restarts)


def _check_tokens(name: str, values: Tensor, dtype: torch.dtype) -> None:
    if values.dtype != dtype or values.ndim != 1 or not len(values):
        raise ValueError(
            f"{name} must be {dtype} of shape ['T'] with T >= 1, got {values.dtype} of shape "
            f"{list(values.shape)}."
        )
