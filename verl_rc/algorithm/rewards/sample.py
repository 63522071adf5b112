"""The input of a reward function (one response and its prompt's row) and its checked output."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from verl_rc.records.plain import is_finite, plain, plain_text, unwrapped

if TYPE_CHECKING:  # reward processes start without torch, which the data package loads
    from verl_rc.records.dataset import PromptRow

_SHOWN_CHARACTERS = 80

FAILURE_COLUMN = "reward_failure"
"""The extra with the reason why a sample was not scored; samples that were scored lack it."""
OVERLONG_COLUMNS = ("overlong_reward", "overlong")
"""The columns that ``overlong_buffer_cfg.log`` adds to the reward function's."""
ENVIRONMENT_PREFIX = "env/"
"""Columns of an environment's metrics begin with it."""
_COLUMNS_OF_THE_RUN = frozenset(
    {
        *("input", "output", "gts", "step", "reward", "reward_model_score"),
        *(FAILURE_COLUMN, *OVERLONG_COLUMNS),
    }
)
_APART = "reward/"


def column_name(name: str) -> str:
    """The column of what a reward function calls ``name``: itself, or ``reward/NAME`` where a run has a
    column of this name, in its dumps, in validation or in scoring."""
    is_taken = name in _COLUMNS_OF_THE_RUN or name.startswith((ENVIRONMENT_PREFIX, _APART))
    return f"{_APART}{name}" if is_taken else name


@dataclass(frozen=True)
class RewardSample:
    """One response to be scored."""

    row_index: int
    """Index of the prompt among all rows of its files."""
    data_source: str
    """Name that selects the scorer."""
    ground_truth: Any
    """Expected answer."""
    extra_info: dict[str, Any]
    """Further fields of the row."""
    solution_str: str
    """The response as text."""
    reward_model_score: float | None = None
    """Score of the reward model; None without one."""

    @classmethod
    def from_row(
        cls, row: "PromptRow", solution_str: str, reward_model_score: float | None = None
    ) -> "RewardSample":
        """The sample of a response to ``row``."""
        return cls(
            row.row_index, row.data_source, row.ground_truth, row.extra_info, solution_str, reward_model_score
        )

    def __str__(self) -> str:
        """The sample's name in messages."""
        return (
            f"row {self.row_index} (data_source {self.data_source!r}, response "
            f"{self.solution_str[:_SHOWN_CHARACTERS]!r})"
        )


_REPR = reprlib.Repr()
"""A repr that also works for objects whose own repr raises or is very long."""
_REPR.maxstring = _REPR.maxother = 80


class RewardError(ValueError):
    """A response that could not be scored; the message names the sample and the reason."""

    @classmethod
    def without_answer(cls, reason: object, sample: object) -> "RewardError":
        """The error of a call that did not return."""
        return cls(f"the reward function did not return, {reason}, for {sample}.")


@dataclass(frozen=True)
class RewardOutput:
    """The score of one response and further values that the reward function returned."""

    score: float
    """The reward, finite; it is placed on the response's last token."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, e.g. ``acc`` (1.0 right, 0.0 wrong) and ``pred`` (the answer that was read): numbers,
    texts, None, or lists and dicts of those."""


def as_reward_output(returned: object, sample: object) -> RewardOutput:
    """Check what a reward function returned: a number, or a mapping with the number under ``score``.

    A bare number also becomes ``acc``; arrays and tensors without dimensions count as numbers. ``sample``
    names the response in the error, ``column_name`` the further values. Raises ``RewardError`` when the score
    is missing, no number, or not finite, or when a further value is nothing that can be written to a file.
    """
    if isinstance(returned, Mapping):
        unnamed = [key for key in returned if not isinstance(key, str)]
        if "score" not in returned or unnamed:
            raise RewardError(
                "a reward function must return a number, or a dict that has 'score' among keys that are "
                f"strings; for {sample} it returned a dict with the keys {_short_repr(list(returned))}."
            )
        extras = {
            column_name(plain_text(key)): _extra(value, key, sample)
            for key, value in returned.items()
            if key != "score"
        }
        if extras.get("acc") is not None:
            extras["acc"] = _number(extras["acc"], "acc", sample)
        return RewardOutput(_number(unwrapped(returned["score"]), "score", sample), extras)
    score = _number(unwrapped(returned), "score", sample)
    return RewardOutput(score, {"acc": score})


def _number(value: object, name: str, sample: object) -> float:
    if not isinstance(value, Real) or not is_finite(value):
        raise RewardError(
            f"the {name} of a reward function must be a finite number, got {_short_repr(value)} "
            f"({type(value).__name__}) for {sample}. Return a float, or a dict with one under 'score'."
        )
    return float(value)


def _extra(value: object, name: str, sample: object) -> object:
    """``value`` made plain, because the driver cannot unpickle classes of the user's module."""
    try:
        return plain(value)
    except TypeError as error:
        raise RewardError(
            "what a reward function returns beside the score must be numbers, texts, None, or lists and "
            f"dicts of those, got {error} under {name!r} for {sample}."
        ) from error


def _short_repr(value: object) -> str:
    """A short repr of ``value`` for a message."""
    try:
        return _REPR.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
