"""Invariants of every token record, whatever the policies are.

A row that a stop token ended ends with one. Two requests get equal ids by chance alone. Ids are inside the
vocabulary. The log-probs of no row belong to the neighbours of its tokens. Many different tokens do not share
the lowest log-prob. The mask leaves out no token that the engine sampled.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_rc.insight.run_folder.signature_sums import ComparedTokens
from verl_rc.metrics.bounds import BOUNDS
from verl_rc.records.token_records.token_record import TOKEN_CLASSES, Array, TokenRecord

_FEWEST_PAIRS = 8
"""Uncertain tokens of a row that its check for a shift needs."""
_FEWEST_AT_FLOOR = 8
"""Different log-probs of the trainer among the tokens with the lowest log-prob; fewer are a coincidence."""


@dataclass(frozen=True)
class Broken:
    """Rows that break an invariant."""

    rows: tuple[int, ...]
    """Places in the batch."""
    checked: int
    """The number of checked rows."""


Invariants = Mapping[str, Broken]
"""The broken rows of each invariant, by its name."""


def broken_invariants(record: TokenRecord) -> Invariants:
    """Invariants by name; those whose fields or facts are not known are left out."""
    tokens = ComparedTokens.from_record(record)
    checked = {
        "stop": _without_stop_token(record),
        "equal": _equal_ids(record),
        "vocabulary": _outside_vocabulary(record),
        "shifted": None if tokens is None else _shifted(tokens),
        "floor": None if tokens is None else _floored(tokens),
        "mask": _outside_mask(record),
    }
    return {name: broken for name, broken in checked.items() if broken is not None}


def _numbers(record: TokenRecord, indices: Array) -> tuple[int, ...]:
    return tuple(record.rows["row"][indices].tolist())


def _without_stop_token(record: TokenRecord) -> Broken | None:
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
    """The integers of a fact, which holds one or a list of them."""
    values = value if isinstance(value, list | tuple) else [value]
    return [number for number in values if isinstance(number, int) and not isinstance(number, bool)]


def _equal_ids(record: TokenRecord) -> Broken | None:
    """Rows that repeat the ids of another row, though chance makes such a pair once in a million steps.

    If the engine samples a row's ids with probability q, it samples them for a second request with
    probability q, too. The probability of any equal pair is at most the sum over the pairs.
    """
    ids, count = record.tokens.get("response_ids"), len(record.lengths)
    # Raw log-probs may be those of a much higher temperature; the trainer's are of its own.
    is_raw = str(record.facts.get("logprobs_mode", "")).startswith("raw")
    names = [name for name in ("rollout_log_prob", "old_log_prob") if name in record.tokens]
    if ids is None or (is_raw and len(names) < 2):
        return None
    mask, row_numbers = record.tokens["response_mask"], record.row_numbers
    log_probs = (record.tokens[name].astype("float64") for name in names)
    sampled = (np.where(mask & np.isfinite(values), values, 0.0) for values in log_probs)
    sums = np.max([np.bincount(row_numbers, values, count) for values in sampled], axis=0)
    rows_by_ids: dict[bytes, dict[int, float]] = {}
    for index in range(count):
        rows = rows_by_ids.setdefault(ids[record.span(index)].tobytes(), {})
        rows[int(record.rows["row"][index])] = float(sums[index])  # a row that was recorded twice is one
    likely = math.log(BOUNDS.chance / max(count * (count - 1) / 2, 1.0))
    groups = (sorted(rows)[1:] for rows in rows_by_ids.values() if max(rows.values()) < likely)
    return Broken(tuple(number for rows in groups for number in rows), count)


def _outside_vocabulary(record: TokenRecord) -> Broken | None:
    """Rows with ids below 0 or, where its size is known, beyond the vocabulary."""
    ids = record.tokens.get("response_ids")
    if ids is None:
        return None
    sizes = _whole_numbers(record.facts.get("vocab_size"))
    outside = (ids < 0) | (ids >= (sizes[0] if sizes else np.iinfo("int32").max))
    return Broken(_numbers(record, np.unique(record.row_numbers[outside])), len(record.lengths))


def _shifted(tokens: ComparedTokens) -> Broken:
    """Rows whose log-probs agree with those of the tokens beside their own, and not with their own."""
    rollout, place = tokens.old_log_probs - tokens.log_ratios, np.arange(len(tokens.row_numbers))
    is_shifted = is_long = np.zeros(len(tokens.record.lengths), bool)
    for lag in BOUNDS.lags:
        neighbour = np.clip(place + lag, 0, len(place) - 1)
        is_pair = (
            tokens.is_compared
            & tokens.is_compared[neighbour]
            & (tokens.row_numbers[neighbour] == tokens.row_numbers)
        )
        # Log-probs near 0 are all alike.
        is_pair &= neighbour == place + lag
        is_pair &= np.minimum(tokens.old_log_probs, rollout[neighbour]) < -BOUNDS.lag_distance
        has_pairs = tokens.by_row(is_pair) >= _FEWEST_PAIRS

        # Of the same tokens: one that is far off at the end of a row has no neighbour on one side.
        unshifted, shifted = (
            tokens.by_row(np.where(is_pair, np.abs(tokens.old_log_probs - values), 0.0))
            for values in (rollout, rollout[neighbour])
        )
        mean = unshifted / np.maximum(tokens.by_row(is_pair), 1)
        is_long = is_long | (has_pairs & (lag != 0))
        is_shifted = is_shifted | (
            has_pairs & (mean > BOUNDS.lag_distance) & (shifted < BOUNDS.row_lag * unshifted)
        )
    return Broken(_numbers(tokens.record, np.flatnonzero(is_shifted)), int(is_long.sum()))


def _floored(tokens: ComparedTokens) -> Broken:
    """Rows with the engine's lowest log-prob, if many tokens have exactly this log-prob, the trainer gives
    them different ones, and they make most of the gap.

    Equal tokens behind equal prefixes have one log-prob on both sides; other tokens share a float by chance.
    """
    rollout = tokens.record.tokens["rollout_log_prob"]
    lowest = rollout[tokens.is_compared].min()
    at_floor = tokens.is_compared & (rollout == lowest)
    different = np.unique(np.round(tokens.old_log_probs[at_floor] / BOUNDS.reproduced))
    squares = np.square(tokens.log_ratios)
    is_floor = len(different) >= _FEWEST_AT_FLOOR
    is_floor = is_floor and squares[at_floor].sum() > squares.sum() / 2
    rows = np.unique(tokens.row_numbers[at_floor]) if is_floor else np.zeros(0, int)
    return Broken(_numbers(tokens.record, rows), len(np.unique(tokens.row_numbers[tokens.is_compared])))


def _outside_mask(record: TokenRecord) -> Broken:
    """Rows whose mask leaves out a token with a log-prob of the engine, but not all tokens.

    Tokens that the engine did not sample have none: 0, or NaN.
    """
    rollout, mask = record.tokens["rollout_log_prob"], record.tokens["response_mask"]
    rows = record.row_numbers
    marked = np.unique(rows[mask])
    outside = np.unique(rows[~mask & np.isfinite(rollout) & (rollout != 0)])
    return Broken(_numbers(record, np.intersect1d(marked, outside)), len(marked))
