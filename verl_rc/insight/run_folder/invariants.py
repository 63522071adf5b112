"""What must hold of every token record, whatever the policies are: checked exactly, without statistics.

Rows that a stop token ended end with one; two requests do not get the same ids but by chance; ids are inside
the vocabulary; the log-probs of no row belong to the tokens beside them; the lowest log-prob is not that of
many different tokens; the mask leaves out no token that the engine sampled.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_rc.data.token_record import TOKEN_CLASSES, Array, TokenRecord
from verl_rc.insight.run_folder.signature_sums import ComparedTokens
from verl_rc.metrics.bounds import BOUNDS

_FEWEST_PAIRS = 8
"""Tokens of a row, not nearly certain ones, below which its shift is not looked for."""
_FEWEST_AT_FLOOR = 8
"""Tokens with the lowest log-prob that the trainer tells apart, below which it is a coincidence."""


@dataclass(frozen=True)
class Broken:
    """Which rows break an invariant."""

    rows: tuple[int, ...]
    """Their numbers in the record."""
    checked: int
    """Of how many."""


Invariants = Mapping[str, Broken]
"""By name."""


def broken_invariants(record: TokenRecord) -> Invariants:
    """By name what was checked; left out where a field or a fact is not known."""
    tokens = ComparedTokens.from_record(record)
    checked = {
        "stop": _without_stop(record),
        "equal": _equal(record),
        "vocabulary": _outside(record),
        "shifted": None if tokens is None else _shifted(tokens),
        "floor": None if tokens is None else _floored(tokens),
        "mask": _outside_mask(record),
    }
    return {name: broken for name, broken in checked.items() if broken is not None}


def _numbers(record: TokenRecord, indices: Array) -> tuple[int, ...]:
    return tuple(record.rows["row"][indices].tolist())


def _without_stop(record: TokenRecord) -> Broken | None:
    """Finished rows whose last token, which the policy sampled, is no stop token."""
    stops, ids = _whole_numbers(record.facts.get("stop_token_ids")), record.tokens.get("response_ids")
    if not stops or ids is None or "finished" not in record.rows:
        return None
    rows = np.flatnonzero(record.rows["finished"] & (record.lengths > 0))
    last = record.starts[rows] + record.lengths[rows] - 1
    is_sampled = record.tokens["response_mask"][last]
    rows, last = rows[is_sampled], last[is_sampled]
    is_stop = np.isin(ids[last], stops)
    if "token_class" in record.tokens:  # a model may have further stop tokens, which are special ones
        is_stop |= record.tokens["token_class"][last] == TOKEN_CLASSES.index("special")
    return Broken(_numbers(record, rows[~is_stop]), len(last))


def _whole_numbers(value: Any) -> list[int]:
    """The ids of a fact: one or several."""
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def _equal(record: TokenRecord) -> Broken | None:
    """Rows that repeat the ids of another row, where chance makes any such pair once in a million steps.

    Ids that the engine samples with probability q are sampled for another request, too, with probability q;
    that any pair of rows is equal by chance has at most the sum of theirs.
    """
    ids, count = record.tokens.get("response_ids"), len(record.lengths)
    # Raw log-probs may be those of a much higher temperature; the trainer's are of its own.
    is_raw = str(record.facts.get("logprobs_mode", "")).startswith("raw")
    names = [name for name in ("rollout_log_prob", "old_log_prob") if name in record.tokens]
    if ids is None or (is_raw and len(names) < 2):
        return None
    mask, numbers = record.tokens["response_mask"], np.repeat(np.arange(count), record.lengths)
    log_probs = (record.tokens[name].astype("float64") for name in names)
    sampled = (np.where(mask & np.isfinite(values), values, 0.0) for values in log_probs)
    sums = np.max([np.bincount(numbers, values, count) for values in sampled], axis=0)
    seen: dict[bytes, dict[int, float]] = {}
    for index in range(count):
        rows = seen.setdefault(ids[record.span(index)].tobytes(), {})
        rows[int(record.rows["row"][index])] = float(sums[index])  # a row that was recorded twice is one
    likely = math.log(BOUNDS.chance / max(count * (count - 1) / 2, 1.0))
    groups = (sorted(rows)[1:] for rows in seen.values() if max(rows.values()) < likely)
    return Broken(tuple(number for rows in groups for number in rows), count)


def _outside(record: TokenRecord) -> Broken | None:
    """Rows with ids below 0 or, where its size is known, beyond the vocabulary."""
    ids = record.tokens.get("response_ids")
    if ids is None:
        return None
    sizes = _whole_numbers(record.facts.get("vocab_size"))
    outside = (ids < 0) | (ids >= (sizes[0] if sizes else np.iinfo("int32").max))
    rows = np.repeat(np.arange(len(record.lengths)), record.lengths)[outside]
    return Broken(_numbers(record, np.unique(rows)), len(record.lengths))


def _shifted(tokens: ComparedTokens) -> Broken:
    """Rows whose log-probs agree with those of the tokens beside their own, and not with their own."""
    rollout, place = tokens.train - tokens.logs, np.arange(len(tokens.rows))
    is_shifted = is_long = np.zeros(len(tokens.record.lengths), bool)
    for lag in BOUNDS.lags:
        other = np.clip(place + lag, 0, len(place) - 1)
        is_pair = tokens.valid & tokens.valid[other] & (tokens.rows[other] == tokens.rows)
        # Log-probs near 0 are all alike.
        is_pair &= (other == place + lag) & (np.minimum(tokens.train, rollout[other]) < -BOUNDS.lag_distance)
        has_pairs = tokens.by_row(is_pair) >= _FEWEST_PAIRS

        # Of the same tokens: one that is far off at the end of a row has no neighbour on one side.
        own, shifted = (
            tokens.by_row(np.where(is_pair, np.abs(tokens.train - values), 0.0))
            for values in (rollout, rollout[other])
        )
        mean = own / np.maximum(tokens.by_row(is_pair), 1)
        is_long = is_long | (has_pairs & (lag != 0))
        is_shifted = is_shifted | (
            has_pairs & (mean > BOUNDS.lag_distance) & (shifted < BOUNDS.row_lag * own)
        )
    return Broken(_numbers(tokens.record, np.flatnonzero(is_shifted)), int(is_long.sum()))


def _floored(tokens: ComparedTokens) -> Broken:
    """Rows with the engine's lowest log-prob, where it reports this very number for tokens that the trainer
    tells apart, and they make most of the gap.

    Equal tokens behind equal prefixes have one log-prob on both sides; others have the same float by chance.
    """
    rollout = tokens.record.tokens["rollout_log_prob"]
    lowest = rollout[tokens.valid].min()
    at_floor = tokens.valid & (rollout == lowest)
    different = np.unique(np.round(tokens.train[at_floor] / BOUNDS.reproduced))
    squares = np.square(tokens.logs)
    is_floor = len(different) >= _FEWEST_AT_FLOOR
    is_floor = is_floor and squares[at_floor].sum() > squares.sum() / 2
    rows = np.unique(tokens.rows[at_floor]) if is_floor else np.zeros(0, int)
    return Broken(_numbers(tokens.record, rows), len(np.unique(tokens.rows[tokens.valid])))


def _outside_mask(record: TokenRecord) -> Broken:
    """Rows of which the mask leaves out a token that has the engine's log-prob, and not all of them.

    Tokens that nobody sampled have none: 0, or not a number.
    """
    rollout, mask = record.tokens["rollout_log_prob"], record.tokens["response_mask"]
    rows = np.repeat(np.arange(len(record.lengths)), record.lengths)
    marked = np.unique(rows[mask])
    outside = np.unique(rows[~mask & np.isfinite(rollout) & (rollout != 0)])
    return Broken(_numbers(record, np.intersect1d(marked, outside)), len(marked))
