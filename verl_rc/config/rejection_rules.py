"""The rejection rules by name: their statistic, its scope, and what their thresholds bound."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from verl_rc.config.errors import shortened
from verl_rc.config.thresholds import Threshold

Scope = Literal["token", "seq_sum", "seq_mean", "seq_max"]
Divergence = Literal["k1", "k2", "k3", "tv", "bkl", "kpop"]

_LARGEST: dict[Divergence, float] = {
    "k1": math.inf,
    "k2": 200.0,
    "k3": math.exp(20.0),
    "tv": 1.0,
    "bkl": 18.5,
    "kpop": 18.5,
}
"""The statistic of one token: log-ratios are bounded by ±20, probabilities are kept 1e-8 away from 0 and 1."""


@dataclass(frozen=True)
class RejectionRule:
    """One option of ``rollout_rs``."""

    scope: Scope
    """``token``: each token by itself; ``seq_*``: the whole row, by the sum, mean or maximum over its tokens."""
    divergence: Divergence
    """The per-token statistic. Of the log-ratio l = train - rollout: k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 - l. Of the sampled
    token's probabilities p under train and q under rollout: tv = |p - q|, bkl = the KL divergence of q from p with all other
    tokens taken together, kpop = the larger of the two directions of that."""

    @property
    def name(self) -> str:
        """``<scope>_<divergence>``."""
        return f"{self.scope}_{self.divergence}"

    @property
    def bounds_ratio(self) -> bool:
        """Whether thresholds are bounds on the ratio train/rollout (k1); else they are upper bounds on the statistic."""
        return self.divergence == "k1"

    @property
    def largest(self) -> float:
        """Upper limit of the statistic of one token, and so of a row's mean or maximum."""
        if self.scope == "seq_sum":
            return math.inf
        return _LARGEST[self.divergence]

    @property
    def is_per_token(self) -> bool:
        """Whether single tokens are rejected; otherwise whole rows."""
        return self.scope == "token"


@dataclass(frozen=True)
class BoundedRule:
    """A rejection rule with the bounds of its statistic, both inclusive."""

    rule: RejectionRule
    lower: float
    """Smallest accepted value of the statistic; -inf: none."""
    upper: float
    """Largest accepted value."""

    @classmethod
    def from_threshold(cls, rule: RejectionRule, threshold: Threshold) -> "BoundedRule":
        """The rule with the bounds of ``threshold``; for k1, a ratio within [L, U] is a statistic within [-ln U, -ln L]."""
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
    )
}
"""The options of ``rollout_rs``: verl's eleven, then those of probabilities. There is no ``seq_max_k1``: the largest -l says
nothing about ratios above 1."""

_FORMER_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def nearest_name(given: str, known: Iterable[str]) -> str:
    """The most similar of ``known``."""
    return difflib.get_close_matches(given, list(known), n=1, cutoff=0.0)[0]


def parse_rules(text: str, key: str) -> list[RejectionRule]:
    """The rules named in comma-separated ``text``, duplicates dropped, order kept.

    Raises ``ValueError`` naming ``key`` for an empty list or an unknown rule, with the nearest known one.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in REJECTION_RULES:
            nearest = _FORMER_NAMES.get(name) or nearest_name(name, REJECTION_RULES)
            raise ValueError(
                f"{key} must name rules among {', '.join(REJECTION_RULES)}; got {shortened(repr(name))}, use {nearest}?"
            )
    return [REJECTION_RULES[name] for name in names]
