"""The gap by position, length, age, probability, kind, turn and data source of the tokens.

Sums are over rows that were drawn at random. Bands are bootstrapped over rows, because tokens of one row are
not independent.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from verl_rc.insight.run_folder.signature_sums import ComparedTokens
from verl_rc.records.token_records.token_record import TOKEN_CLASSES, Array, TokenRecord, noise_scale

_POSITIONS = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384)
_LENGTHS = (0, 16, 64, 256, 1024, 4096, 16384)
_AGES = (0, 1, 2, 3, 5, 9)
_PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99)
_TURNS = (1, 2, 3, 4)
_MOST_SOURCES = 8
_DRAWS = 200
_MOST_BLOCKS = 1_000
"""Blocks of rows that the bootstrap draws; more rows share them."""
_BAND = (5.0, 95.0)
_FLOOR_STEPS = 2


@dataclass(frozen=True)
class Bar:
    """The tokens of one bucket."""

    label: str
    tokens: int
    size: float
    """Logit noise ``sqrt(sum of l^2 / sum of g)``, nats; without g the root mean square of l."""
    low: float
    high: float
    """A band of 90 % over rows."""
    share_of_tokens: float
    share_of_gap: float
    """Share of the sum of squared log-ratios."""


@dataclass(frozen=True)
class Profile:
    """The gap by one property of tokens."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Profiles:
    """All profiles of a run."""

    profiles: tuple[Profile, ...]
    rows: int
    tokens: int
    has_noise: bool
    """Whether sizes are logit noise, which is equal for likely and for rare tokens."""
    floor: float | None
    """Size in the records of the first two steps."""


class ProfileSums:
    """Sums of every row by bucket, collected record by record."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Array]] = {}
        self._sources: list[str] = []
        self._has_noise = True
        self._floor = np.zeros(3)
        self._rows = 0

    def add(self, tokens: ComparedTokens) -> None:
        """Add the compared tokens of a record."""
        record, is_compared = tokens.record, tokens.is_compared
        is_random = record.rows["chosen_by"] == "random"
        noise = noise_scale(record.tokens)
        self._has_noise = self._has_noise and noise is not None
        squares = np.square(tokens.log_ratios)
        gradients = (
            np.ones_like(squares) if noise is None else np.square(np.nan_to_num(noise).astype("float64"))
        )
        values = np.stack([squares, np.where(is_compared, gradients, 0.0), is_compared.astype("float64")])
        place = np.cumsum(is_random) - 1
        for name, (buckets, bucket_of_token) in self._buckets(tokens).items():
            key = (place[tokens.row_numbers] * buckets + bucket_of_token)[is_compared]
            size = int(is_random.sum()) * buckets
            sums = np.stack([np.bincount(key, part[is_compared], size) for part in values])
            self._sums.setdefault(name, []).append(sums.reshape(3, -1, buckets))
        if record.step <= _FLOOR_STEPS:
            self._floor += values.sum(axis=1)
        self._rows += int(is_random.sum())

    def _buckets(self, compared: ComparedTokens) -> Mapping[str, tuple[int, Array]]:
        """Number of buckets, and the bucket of every token, by property."""
        record, row_numbers, positions = compared.record, compared.row_numbers, compared.positions
        tokens, mask = record.tokens, record.tokens["response_mask"]
        starts_turn = mask & ~np.concatenate([[False], mask[:-1]])
        starts_turn |= mask & (positions == 0)
        turns = np.cumsum(starts_turn)
        turns_before_row = (turns - starts_turn)[np.minimum(record.starts, len(turns) - 1)]
        buckets = {
            "position": _digitize(positions, _POSITIONS),
            "length": _digitize(record.lengths[row_numbers], _LENGTHS),
            "probability": _digitize(
                np.exp(np.nan_to_num(tokens["old_log_prob"], neginf=-100.0)), _PROBABILITIES
            ),
            "turn": _digitize(turns - turns_before_row[row_numbers], _TURNS),
            "source": (_MOST_SOURCES, self._source_numbers(record)[row_numbers]),
        }
        if "token_class" in tokens:
            classes = tokens["token_class"].astype("int64")
            buckets["class"] = (len(TOKEN_CLASSES), np.clip(classes, 0, len(TOKEN_CLASSES) - 1))
        if (ages := record.ages()) is not None:
            buckets["age"] = _digitize(ages, _AGES)
        return buckets

    def _source_numbers(self, record: TokenRecord) -> Array:
        """The number of each row's data source, the last one for all that come later."""
        for name in dict.fromkeys(map(str, record.rows["source"])):
            if name not in self._sources and len(self._sources) < _MOST_SOURCES:
                self._sources.append(name)
        numbers = {name: number for number, name in enumerate(self._sources)}
        return np.array(
            [numbers.get(str(name), _MOST_SOURCES - 1) for name in record.rows["source"]], dtype="int64"
        )

    def profiles(self) -> Profiles | None:
        """The profiles of all records; None without any row."""
        if not self._rows:
            return None
        labels = {
            "position": ("Position in the response", _labels(_POSITIONS)),
            "length": ("Length of the response", _labels(_LENGTHS)),
            "age": ("Age: updates since the weights that sampled it", _labels(_AGES)),
            "probability": ("Probability under the trainer", _labels(_PROBABILITIES, integers=False)),
            "class": ("Kind of token", TOKEN_CLASSES),
            "turn": ("Turn of the conversation", _labels(_TURNS)),
            "source": ("Data source", self._sources),
        }
        profiles = [
            self._profile(title, names, self._sums[name])
            for name, (title, names) in labels.items()
            if name in self._sums
        ]
        tokens = int(sum(part[2].sum() for part in self._sums["position"]))
        square, *divisors = self._floor
        floor = float(np.sqrt(square / divisors[not self._has_noise])) if divisors[0] else None
        return Profiles(tuple(profiles), self._rows, tokens, self._has_noise, floor)

    def _profile(self, title: str, labels: Iterable[str], parts: Sequence[Array]) -> Profile:
        sums = np.concatenate(parts, axis=1)  # [3, rows, buckets]
        squares, divisors, tokens = sums[0], sums[1 if self._has_noise else 2], sums[2].sum(axis=0)
        size = _root(squares.sum(axis=0), divisors.sum(axis=0))
        draws = _root(_bootstrap_sums(squares), _bootstrap_sums(divisors))
        with np.errstate(invalid="ignore"):
            low, high = np.nanpercentile(np.where(np.isfinite(draws), draws, 0.0), _BAND, axis=0)
        squared_gap = max(float(squares.sum()), 1e-300)
        bars = (
            Bar(
                label,
                int(tokens[i]),
                float(size[i]),
                float(low[i]),
                float(high[i]),
                float(tokens[i] / tokens.sum()),
                float(squares[:, i].sum() / squared_gap),
            )
            for i, label in enumerate(labels)
            if tokens[i] and np.isfinite(size[i])
        )
        return Profile(title, tuple(bars))


def _root(squares: Array, divisors: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        size: Array = np.sqrt(squares / divisors)
    return size


def _bootstrap_sums(rows: Array) -> Array:
    """float64 ``[draws, buckets]``: bootstrapped sums of ``rows`` ``[rows, buckets]``. The draws depend on
    the number of rows alone."""
    count = min(len(rows), _MOST_BLOCKS)
    blocks = np.zeros((count, rows.shape[1]))
    np.add.at(blocks, np.arange(len(rows)) % count, rows)
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_DRAWS)
    totals: Array = weights.astype("float64") @ blocks
    return totals


def _digitize(values: Array, edges: Sequence[float]) -> tuple[int, Array]:
    return len(edges), np.clip(
        np.searchsorted(np.array(edges, dtype="float64"), values, side="right") - 1, 0, None
    )


def _labels(edges: Sequence[float], integers: bool = True) -> Iterator[str]:
    for low, high in pairwise(edges):
        last = high - 1 if integers else high
        yield f"{low:g}" if last == low else f"{low:g} to {last:g}"
    yield f"{edges[-1]:g} and more"
