"""The rejection rules by name: their statistic, its scope, and what their thresholds bound; thresholds as
typed values."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from verl_rc.config.errors import nearest_key, shortened

_NUMBER = re.compile(r"[+-]?(\d+(?:\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_SHAPES = "a number such as 2.0, a band such as 0.5_5.0, or a mapping such as {lower: 0.5, upper: 5.0}"


@dataclass(frozen=True)
class Threshold:
    """An upper bound, with a lower one when it is a band. Both inclusive."""

    upper: float
    """Largest value within bounds."""
    lower: float | None = None
    """Smallest value within bounds. None if only an upper bound was given."""

    @property
    def reciprocal_lower(self) -> float:
        """The lower bound of a ratio: the given one, else ``1 / upper``."""
        return 1.0 / self.upper if self.lower is None else self.lower

    def __str__(self) -> str:
        return repr(self.upper) if self.lower is None else f"{self.lower!r}_{self.upper!r}"


def parse_threshold(value: object, key: str) -> Threshold:
    """Read one threshold: ``2.0``, ``"2.0"``, ``"0.5_5.0"``, ``{lower: 0.5, upper: 5.0}`` or ``[0.5, 5.0]``.

    Raises ``ValueError`` naming ``key`` unless the bounds are finite, positive and in order.
    """
    numbers = [_number(bound, value, key) for bound in _bounds(value, key)]
    if not 1 <= len(numbers) <= 2:
        raise ValueError(f"{key} must be {_SHAPES}; got {shortened(repr(value))}")
    if any(not math.isfinite(number) or number <= 0 for number in numbers):
        raise ValueError(f"{key} must be finite and > 0; got {shortened(repr(value))}")
    if len(numbers) == 2 and numbers[0] > numbers[1]:
        raise ValueError(
            f"{key} must have lower <= upper; got {shortened(repr(value))}, did you mean "
            f"{numbers[1]!r}_{numbers[0]!r}?"
        )
    return Threshold(numbers[-1], numbers[0] if len(numbers) == 2 else None)


def threshold_specs(value: object) -> list[object]:
    """The thresholds in ``value``: the parts of comma-separated text or of a list, else the value itself."""
    if isinstance(value, str):
        return list(value.split(","))
    if isinstance(value, Sequence):
        return list(value)
    return [value]


def _bounds(value: object, key: str) -> list[object]:
    if isinstance(value, Mapping):
        unknown = sorted(set(map(str, value)) - {"lower", "upper"})
        if unknown or value.get("upper") is None:
            raise ValueError(f"{key} as a mapping must have upper, and perhaps lower; got {dict(value)}")
        return [value[name] for name in ("lower", "upper") if value.get(name) is not None]
    if isinstance(value, str):
        return list(value.strip().split("_"))
    return list(value) if isinstance(value, Sequence) else [value]


def _number(bound: object, value: object, key: str) -> float:
    if isinstance(bound, str) and _NUMBER.fullmatch(bound.strip()):
        return float(bound)
    if isinstance(bound, (int, float)) and not isinstance(bound, bool):
        return float(bound)
    raise ValueError(f"{key} must be {_SHAPES}; got {shortened(repr(value))}")


Scope = Literal["token", "turn_sum", "turn_mean", "seq_sum", "seq_mean", "seq_max"]
Divergence = Literal["k1", "k2", "k3", "tv", "bkl", "kpop"]

_LARGEST: dict[Divergence, float] = {
    "k1": math.inf,
    "k2": 200.0,
    "k3": math.exp(20.0),
    "tv": 1.0,
    "bkl": 18.5,
    "kpop": 18.5,
}
"""The statistic of one token: log-ratios are bounded by ±20, probabilities are kept 1e-8 away from 0 and 1.
"""


@dataclass(frozen=True)
class RejectionRule:
    """One option of ``rollout_rs``."""

    scope: Scope
    """``token``: each token by itself; ``turn_*``: a turn of the policy (a run of its tokens), by the sum or
    mean over them; ``seq_*``: the whole row, by the sum, mean or maximum."""
    divergence: Divergence
    """The per-token statistic. With the log-ratio l = train - rollout: k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 -
    l. With the sampled token's probabilities p under train and q under rollout: tv = |p - q|, bkl = the KL
    divergence of q from p with all other tokens taken together, kpop = the larger of bkl in both
    directions."""

    @property
    def name(self) -> str:
        """``<scope>_<divergence>``."""
        return f"{self.scope}_{self.divergence}"

    @property
    def bounds_ratio(self) -> bool:
        """Whether thresholds are bounds on the ratio train/rollout (k1); else they are upper bounds on the
        statistic."""
        return self.divergence == "k1"

    @property
    def largest(self) -> float:
        """Upper limit of the statistic of one token, and so of a row's mean or maximum."""
        if self.scope in ("turn_sum", "seq_sum"):
            return math.inf
        return _LARGEST[self.divergence]

    @property
    def rejects_rows(self) -> bool:
        """Whether whole rows are rejected; otherwise single tokens, or turns of them."""
        return self.scope.startswith("seq")


@dataclass(frozen=True)
class BoundedRule:
    """A rejection rule with the bounds of its statistic, both inclusive."""

    rule: RejectionRule
    lower: float
    """Smallest accepted value of the statistic. -inf without a lower bound."""
    upper: float
    """Largest accepted value."""

    @classmethod
    def from_threshold(cls, rule: RejectionRule, threshold: Threshold) -> "BoundedRule":
        """The rule with the bounds of ``threshold``; for k1, a ratio within [L, U] is a statistic within [-ln
        U, -ln L]."""
        if rule.bounds_ratio:
            return cls(rule, -math.log(threshold.upper), -math.log(threshold.reciprocal_lower))
        return cls(rule, -math.inf, threshold.upper)

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.rule.name


REJECTION_RULES: dict[str, RejectionRule] = {
    rule.name: rule
    for rule in (
        RejectionRule("token", "k1"),
        RejectionRule("token", "k2"),
        RejectionRule("token", "k3"),
        RejectionRule("seq_sum", "k1"),
        RejectionRule("seq_sum", "k2"),
        RejectionRule("seq_sum", "k3"),
        RejectionRule("seq_mean", "k1"),
        RejectionRule("seq_mean", "k2"),
        RejectionRule("seq_mean", "k3"),
        RejectionRule("seq_max", "k2"),
        RejectionRule("seq_max", "k3"),
        RejectionRule("token", "tv"),
        RejectionRule("token", "bkl"),
        RejectionRule("token", "kpop"),
        RejectionRule("seq_max", "tv"),
        RejectionRule("seq_max", "bkl"),
        RejectionRule("turn_sum", "k1"),
        RejectionRule("turn_mean", "k1"),
    )
}
"""The options of ``rollout_rs``: verl's eleven, then those of probabilities and of turns. There is no
``seq_max_k1``: the largest -l says nothing about ratios above 1."""

_FORMER_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def parse_rules(text: str, key: str) -> list[RejectionRule]:
    """The rules named in comma-separated ``text``, duplicates dropped, order kept.

    Raises ``ValueError`` naming ``key`` for an empty list or an unknown rule, with the nearest known one.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in REJECTION_RULES:
            nearest = _FORMER_NAMES.get(name) or nearest_key(name, REJECTION_RULES)
            raise ValueError(
                f"{key} must name rules among {', '.join(REJECTION_RULES)}; got {shortened(repr(name))}, use "
                f"{nearest}?"
            )
    return [REJECTION_RULES[name] for name in names]
