"""Entries of the metric catalogue, and their look-up: by the whole name first, then by the most specific
pattern."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from verl_rc.metrics.splits import (
    ANSWERS,
    NUM_AGES,
    NUM_TURNS,
    PERCENTS,
    PROMPT_ACCOUNTS,
    SIGNS,
    STAGES,
    TOKEN_ACCOUNTS,
)

Bounds = tuple[float | None, float | None]
"""Lower and upper bound. None means unbounded on that side."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_PLACEHOLDER_VALUES = {
    "data_source": r".+",
    "n": r"\d+",
    "rule": r"[a-z][a-z0-9_]*",
    "level": "token|sequence|prompt",
    "statistic": "mean|std|min|max",
    "percent": "|".join(map(str, PERCENTS)),
    "age": "|".join(map(str, range(NUM_AGES))),
    "turn": "|".join(map(str, range(NUM_TURNS))),
    "split": "|".join((*SIGNS, *ANSWERS)),
    "stage": "|".join(STAGES),
    "spread": "mean|max|min",
    "extreme": "max|min",
    "side": "high|low",
    "role": "actor|critic",
    "model": "actor|actor_infer|critic",
    "policy": "training|rollout",
    "owner": "student|teacher",
    "clipping": "pg_clipfrac|pg_clipfrac_lower|ppo_kl|ppo_kl_clamped_fraction",
    "fate": "kept|rejected",
    "kind": "allocated|reserved",
    "account": "|".join(TOKEN_ACCOUNTS),
    "prompts": "|".join(("sampled", *PROMPT_ACCOUNTS)),
}
"""Regular expressions; where values are finite, one that lists them."""


@dataclass(frozen=True)
class MetricSpec:
    """The meaning of a metric."""

    name: str
    """The full name, or a pattern: ``{data_source}`` stands for any text, ``{n}`` for a number, others for
    one of some words or for any one."""
    unit: str
    """``nats``, ``tokens``, ``s``, …; ``1`` for ratios, fractions and counts without a unit of their own."""
    formula: str
    """The formula, in one line."""
    healthy: Bounds | None = None
    """Range in a run that goes well; None when no general statement is possible."""

    @property
    def lowest_healthy(self) -> float:
        """The lower end of the healthy range; raises ``ValueError`` without one."""
        return self._end(0)

    @property
    def highest_healthy(self) -> float:
        """The upper end of the healthy range; raises ``ValueError`` without one."""
        return self._end(1)

    def _end(self, side: int) -> float:
        end = (self.healthy or (None, None))[side]
        if end is None:
            raise ValueError(
                f"metric '{self.name}' must have a healthy range that ends on that side, it is "
                f"{self.healthy}."
            )
        return end

    @property
    def healthy_in_words(self) -> str:
        """The healthy range in words; empty without one."""
        match self.healthy:
            case None | (None, None):
                return ""
            case (None, high):
                return f"≤ {high:g}"
            case (low, None):
                return f"≥ {low:g}"
            case (low, high):
                return f"{low:g}" if low == high else f"{low:g} to {high:g}"

    @property
    def is_pattern(self) -> bool:
        """Whether the name has placeholders."""
        return "{" in self.name

    def matches(self, name: str) -> bool:
        """Whether ``name`` is this metric, or matches this pattern."""
        return self._regex.fullmatch(name) is not None

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = _PLACEHOLDER.split(self.name)  # literal, placeholder, literal, …
        literals, placeholders = parts[::2], parts[1::2]
        pattern = re.escape(literals[0])
        for placeholder, literal in zip(placeholders, literals[1:], strict=True):
            pattern += f"(?:{_PLACEHOLDER_VALUES.get(placeholder, r'[^/]+')})" + re.escape(literal)
        return re.compile(pattern)


def spread(prefix: str, unit: str, quantity: str) -> MetricSpec:
    """The entry of ``<prefix>/mean``, ``/max`` and ``/min`` of a ``quantity``, which ends in what they are
    taken over."""
    return MetricSpec(f"{prefix}/{{spread}}", unit, quantity)


class Catalog:
    """A set of entries with distinct names."""

    def __init__(self, specs: Iterable[MetricSpec]) -> None:
        """Raises ``ValueError`` when a name is defined twice."""
        self._by_name: dict[str, MetricSpec] = {}
        for spec in specs:
            if spec.name in self._by_name:
                raise ValueError(f"metric '{spec.name}' must have one definition, got two.")
            self._by_name[spec.name] = spec
        patterns = (spec for spec in self._by_name.values() if spec.is_pattern)
        # Of several that match, the one with most characters outside placeholders is the most specific.
        self._patterns = sorted(patterns, key=lambda spec: -len(_PLACEHOLDER.sub("", spec.name)))

    def __iter__(self) -> Iterator[MetricSpec]:
        return iter(self._by_name.values())

    def find(self, name: str) -> MetricSpec | None:
        """The entry of ``name``, or None."""
        if name in self._by_name and not self._by_name[name].is_pattern:
            return self._by_name[name]
        return next((spec for spec in self._patterns if spec.matches(name)), None)

    def describe(self, name: str) -> MetricSpec:
        """The entry of ``name``; raises ``ValueError`` with the nearest known name."""
        spec = self.find(name)
        if spec is None:
            raise ValueError(f"metric {self._unknown_name(name)}.")
        return spec

    def check_names(self, names: Iterable[str]) -> None:
        """Raises ``ValueError`` unless every name has an entry, naming the nearest known one for each that
        has none."""
        unknown = [name for name in names if self.find(name) is None]
        if unknown:
            complaints = "; ".join(self._unknown_name(name) for name in unknown)
            raise ValueError(
                f"every metric must have an entry in verl_rc/metrics/catalog, these have none: {complaints}."
            )

    def _unknown_name(self, name: str) -> str:
        nearest = difflib.get_close_matches(name, self._by_name, n=1, cutoff=0.0)
        return f"'{name}' is unknown (nearest: '{nearest[0]}')" if nearest else f"'{name}' is unknown"
