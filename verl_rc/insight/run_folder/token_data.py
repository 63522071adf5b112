"""Records of single tokens, for a report."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_rc.insight.run_folder.bend import Bend
from verl_rc.insight.run_folder.invariants import Invariants
from verl_rc.insight.run_folder.profiles import Profiles
from verl_rc.records.token_records.token_record import Array

MOST_PICTURE_BYTES = 4 << 20


@dataclass(frozen=True)
class TokenRow:
    """One recorded row."""

    step: int
    facts: Mapping[str, Any]
    cells: Mapping[str, Any]
    """Values of the fields of rows, by name."""
    tokens: Mapping[str, Array]
    """Values of the fields of tokens by name; where versions are known also ``age``, versions since the
    sampling weights."""
    prompt: Array | None
    squares: float
    """Sum of its squared log-ratios; infinite where one is not finite, NaN where the trainer's log-probs are
    not known."""

    @property
    def picture_digests(self) -> list[str]:
        """The SHA-256 of each of its pictures."""
        names = str(self.cells.get("pictures") or "").split()
        return [name for name in names if re.fullmatch("[0-9a-f]{64}", name)]


@dataclass(frozen=True)
class WorstToken:
    """A token whose log-probs differ much."""

    step: int
    row: int
    position: int
    token: int | None
    """The token's id, where ids were recorded."""
    token_class: int | None
    """A number in ``TOKEN_CLASSES``, where it was recorded."""
    rollout_log_prob: float
    old_log_prob: float


@dataclass(frozen=True)
class TokenData:
    """The single tokens that a report shows."""

    steps: Sequence[int]
    """Steps with a record."""
    rows: Sequence[TokenRow]
    """Rows of the newest record, then those with the largest gaps of the others."""
    rows_recorded: int
    worst: Sequence[WorstToken]
    """The tokens with the largest gaps of all records, largest first."""
    profiles: Profiles | None
    """Profiles of the gap. None where nothing was compared."""
    pieces: Mapping[int, str]
    """Text by token id."""
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics by step, then by the catalogue's name."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The facts of the newest record."""
    invariants: Mapping[int, Invariants] = field(default_factory=dict)
    """Checks of invariants, by step."""
    bend: Bend | None = None
    """Bend of the gap over log-probs; None where the records do not tell it."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """Encoded pictures of the rows by SHA-256, the first ones, of ``MOST_PICTURE_BYTES`` together."""
