"""Finding entries: by exact name first, then by the most specific pattern."""

import difflib
from collections.abc import Iterable, Iterator

from verl_rc.metrics.catalog.spec import MetricSpec


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
        self._patterns = sorted(patterns, key=lambda spec: spec.literal_length, reverse=True)

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
            raise ValueError(f"metric {self._complaint(name)}.")
        return spec

    def check_names(self, names: Iterable[str]) -> None:
        """Raises ``ValueError`` unless every name has an entry, naming the nearest known one for each that has none."""
        unknown = [name for name in names if self.find(name) is None]
        if unknown:
            complaints = "; ".join(self._complaint(name) for name in unknown)
            raise ValueError(f"every metric must have an entry in verl_rc/metrics/catalog, these have none: {complaints}.")

    def _complaint(self, name: str) -> str:
        nearest = difflib.get_close_matches(name, self._by_name, n=1, cutoff=0.0)
        return f"'{name}' is unknown (nearest: '{nearest[0]}')" if nearest else f"'{name}' is unknown"
