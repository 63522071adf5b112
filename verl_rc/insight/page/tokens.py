"""Single tokens: rows whose tokens the script colours by what happened to them, the worst tokens, and
profiles as bars."""

import base64
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl_rc.insight.page.encode import packed
from verl_rc.insight.page.text import escaped, number, table
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.run_folder.profiles import Bar, Profile, Profiles
from verl_rc.insight.run_folder.token_data import TokenData, TokenRow, WorstToken
from verl_rc.records.token_records.token_record import TOKEN_CLASSES, Array, noise_scale

MOST_TOKENS = 100_000
"""Tokens of rows that a page holds, with their prompts."""
_UNKNOWN, _UNKNOWN_CLASS = 0xFFFF, 0xFF
_MOST_PIECES = _UNKNOWN
_POLICY, _KEPT, _CUT = 1, 2, 4
"""Bits of a token: the policy sampled it; rollout correction keeps it; its weight was cut."""
_BAR_WIDTH = 160.0
_MOST_TURNS = 20
_TURN_COLUMNS = {"tokens": "response_mask", "rewards": "turn_reward", "waits": "turn_wait"}
_REMEDY_BELOW = 'what <a href="#fields">would record them</a> stands below'
"""The remedy for other trainers, whose panel of fields names their options."""


def tokens_panel(run: RunData, with_text: bool, most_tokens: int) -> tuple[str, dict[str, Any] | None]:
    """The panel and the data of its script; without records, the key that makes a run write them."""
    data = run.tokens
    if data is None:
        advice = "trainer.token_records.enable=True writes them" if run.is_own else _REMEDY_BELOW
        return f'<p class="missing">No token records were found: {advice}.</p>', None
    has_ids = any("response_ids" in row.tokens for row in data.rows)
    visible = replace(data, pieces=data.pieces if with_text and has_ids else {})
    rows = rows_that_fit(data.rows, most_tokens)
    caption = (
        f"{len(data.rows):,} of {data.rows_recorded:,} recorded rows of {len(data.steps)} steps"
        if len(rows) == len(data.rows)
        else f"{len(rows):,} of {data.rows_recorded:,} recorded rows"
    )
    parts = [f"<p>{caption}: those of the newest record, then those whose log-probs differ most.</p>"]
    if data.profiles is None:
        reason = (
            "where the actor corrects (bypass mode, proximal=interpolate) there are none; "
            "algorithm.rollout_correction.bypass_mode=False has them"
            if run.is_own
            else _REMEDY_BELOW
        )
        parts.append(
            '<p class="missing">The trainer\'s log-probs before the update are not in the records: '
            f"{reason}.</p>"
        )
    if not visible.pieces:
        key = " (trainer.token_records.contents=full records it)" if run.is_own else ""
        reason = f"was not recorded{key}" if with_text else "is left out of this page"
        parts.append(f"<p>The text of tokens {reason}; a box stands for a token.</p>")
    parts.append(
        '<div id="token-view"></div>' if rows else "<p>Rows of tokens are left out of this page.</p>"
    )
    parts += [_turns_table(data), _worst_table(visible)]
    if data.profiles is not None:
        parts.append(profiles_html(data.profiles))
    return "".join(parts), _script_data(visible, rows, with_text) if rows else None


def rows_that_fit(rows: Sequence[TokenRow], most_tokens: int) -> list[TokenRow]:
    """The first rows that together have at most ``most_tokens`` tokens, prompts included."""
    fitting, budget = [], most_tokens
    for row in rows:
        budget -= len(row.tokens["response_mask"]) + (0 if row.prompt is None else len(row.prompt))
        if budget < 0:
            break
        fitting.append(row)
    return fitting


def _turns(row: TokenRow) -> dict[str, list[float]]:
    """Tokens of each turn, and its reward and wait where they were recorded. A turn is a run of sampled
    tokens."""
    mask = row.tokens["response_mask"]
    begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    return {
        name: np.add.reduceat(row.tokens[field] * mask.astype("float64"), begins).tolist()
        if len(mask)
        else []
        for name, field in _TURN_COLUMNS.items()
        if field in row.tokens
    }


def _turns_table(data: TokenData) -> str:
    """Mean tokens, reward and wait of the turns of the newest record, by their number; empty where no reward
    of a turn was recorded."""
    turns = [_turns(row) for row in data.rows if row.step == data.steps[-1]]
    if not any("rewards" in row_turns for row_turns in turns):
        return ""
    rows = []
    for turn in range(min(_MOST_TURNS, max(len(row_turns["tokens"]) for row_turns in turns))):
        longer = [row_turns for row_turns in turns if len(row_turns["tokens"]) > turn]
        columns = [
            [row_turns[name][turn] for row_turns in longer if name in row_turns] for name in _TURN_COLUMNS
        ]
        means = [number(float(np.mean(column))) if column else "" for column in columns]
        rows.append((str(turn + 1), str(len(longer)), *means))
    head = ("turn", "rows that have it", "mean tokens", "mean reward", "mean wait, s")
    return f"<h3>Turns of the rows of step {data.steps[-1]}</h3>{table(head, rows, 'samples')}"


def _worst_table(data: TokenData) -> str:
    if not data.worst:
        return ""
    rows = [
        (
            str(token.step),
            str(token.row),
            str(token.position),
            f"<bdi>{escaped(_piece(data, token))}</bdi>",
            "" if token.token_class is None else TOKEN_CLASSES[token.token_class],
            number(token.rollout_log_prob),
            number(token.old_log_prob),
            number(token.old_log_prob - token.rollout_log_prob),
        )
        for token in data.worst
    ]
    head = (
        "step",
        "row",
        "position",
        "token",
        "class",
        "log-prob of the engine",
        "of the trainer",
        "log-ratio",
    )
    return f"<h3>Tokens that differ most</h3>{table(head, rows, 'samples')}"


def _piece(data: TokenData, token: WorstToken) -> str:
    return "▪" if token.token is None else data.pieces.get(token.token, "▪")[:200]


def profiles_html(profiles: Profiles) -> str:
    """Bars with their bands, readable without scripts."""
    unit = "logit noise √(Σl²/Σg), nats" if profiles.has_noise else "root mean square log-ratio, nats"
    floor = (
        ""
        if profiles.floor is None
        else f" The line is that of the first two steps, {number(profiles.floor)}."
    )
    caption = (
        f"<h3>Which tokens the gap belongs to</h3><p>{profiles.tokens:,} tokens of {profiles.rows:,} rows "
        f"that were drawn at random; {escaped(unit)}, with a band of 90 % over rows.{floor}</p>"
    )
    largest = max((bar.high for profile in profiles.profiles for bar in profile.bars), default=0.0)
    tables = "".join(
        _profile_table(profile, largest, profiles.floor)
        for profile in profiles.profiles
        if len(profile.bars) > 1
    )
    return caption + f'<div class="charts">{tables}</div>'


def _profile_table(profile: Profile, largest: float, floor: float | None) -> str:
    rows = [
        (
            f"<bdi>{escaped(bar.label)}</bdi>",
            _bar(bar, largest, floor),
            f"{number(bar.size)} <small>{number(bar.low)} to {number(bar.high)}</small>",
            f"{bar.share_of_tokens:.1%}",
            f"{bar.share_of_gap:.1%}",
        )
        for bar in profile.bars
    ]
    head = ("", "", "size", "of tokens", "of Σl²")
    return f"<figure><figcaption>{escaped(profile.title)}</figcaption>{table(head, rows, 'profile')}</figure>"


def _bar(bar: Bar, largest: float, floor: float | None) -> str:
    def at(value: float) -> float:
        return 1 + (_BAR_WIDTH - 2) * min(value / largest, 1.0) if largest > 0 else 1.0

    mark = (
        ""
        if floor is None
        else f'<line class="floor" x1="{at(floor):.1f}" x2="{at(floor):.1f}" y1="0" y2="14"/>'
    )
    return (
        f'<svg viewBox="0 0 {_BAR_WIDTH:g} 14" role="img" aria-hidden="true">'
        f'<rect class="bar" x="1" y="3" width="{at(bar.size) - 1:.1f}" height="8"/>'
        f'<line class="band" x1="{at(bar.low):.1f}" x2="{at(bar.high):.1f}" y1="7" y2="7"/>{mark}</svg>'
    )


def _script_data(data: TokenData, rows: Sequence[TokenRow], with_text: bool) -> dict[str, Any]:
    """Rows with their tokens; the page holds the text of each token once, and each picture."""
    places: dict[int, int] = {}
    if with_text and data.pieces:
        for row in rows:
            for ids in (row.prompt, row.tokens.get("response_ids")):
                for token in () if ids is None else np.unique(ids).tolist():
                    if token in data.pieces and len(places) < _MOST_PIECES:
                        places.setdefault(token, len(places))
    return {
        "pieces": [[token, data.pieces[token]] for token in places],
        "classes": list(TOKEN_CLASSES),
        "floor": None if data.profiles is None or not data.profiles.has_noise else data.profiles.floor,
        "rows": [_row_data(row, places) for row in rows],
        "pictures": {
            digest: base64.b64encode(image).decode("ascii")
            for digest, image in (data.pictures.items() if with_text else ())
        },
    }


def _row_data(row: TokenRow, places: dict[int, int]) -> dict[str, Any]:
    tokens, mask = row.tokens, row.tokens["response_mask"]
    weight, keep_mask = tokens.get("weight"), tokens.get("kept")
    flags = np.where(mask, _POLICY, 0) | (_KEPT if keep_mask is None else np.where(keep_mask, _KEPT, 0))
    if weight is not None:
        flags = flags | np.where(_is_cut(weight, mask, row), _CUT, 0)
    data: dict[str, Any] = {
        "step": row.step,
        "why": str(row.facts.get("why", "")),
        **{name: row.cells[name] for name in ("row", "group", "chosen_by")},
        "finished": row.cells.get("finished"),
        "source": str(row.cells["source"]),
        "score": _finite_or_text(float(row.cells.get("score", math.nan))),
        "gap": _finite_or_text(row.squares),
        "length": len(mask),
        "ids": _ids(tokens.get("response_ids"), places),
        "prompt": _ids(row.prompt, places),
        "pictures": row.picture_digests,
        "kinds": _bytes(tokens.get("token_class", np.full(len(mask), _UNKNOWN_CLASS)).astype("uint8")),
        "flags": _bytes(flags.astype("uint8")),
        "rollout": packed(tokens["rollout_log_prob"].tolist()),
        "train": packed(tokens["old_log_prob"].tolist()) if "old_log_prob" in tokens else None,
        "turns": {name: [_finite_or_text(value) for value in values] for name, values in _turns(row).items()},
    }
    columns = {
        "weight": weight,
        "advantage": tokens.get("advantage"),
        "entropy": tokens.get("entropy"),
        "noise": noise_scale(tokens),
        "age": tokens.get("age"),
    }
    return data | {name: _compact(values, mask) for name, values in columns.items() if values is not None}


def _is_cut(weight: Array, mask: Array, row: TokenRow) -> Array:
    """Weights at the cap, or set to 0 by a band; not known where weights were divided by their mean."""
    correction = row.facts.get("correction")
    if not isinstance(correction, dict) or correction.get("rollout_is_batch_normalize"):
        return np.zeros_like(mask)
    threshold = correction.get("rollout_is_threshold")
    cap = float(threshold) if isinstance(threshold, int | float) else np.inf
    cut: Array = mask & ((weight >= cap * (1 - 1e-3)) | (weight == 0.0))
    return cut


def _finite_or_text(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


def _ids(ids: Array | None, places: dict[int, int]) -> str | None:
    if ids is None or not places:
        return None
    return _bytes(np.array([places.get(token, _UNKNOWN) for token in ids.tolist()], "<u2"))


def _compact(values: Array, mask: Array) -> float | str | None:
    """One number where all sampled tokens have the same value, else base64 of float16."""
    sampled = values[mask].astype("float64")
    if not len(sampled):
        return None
    if np.isfinite(sampled[0]) and (sampled == sampled[0]).all():
        return float(sampled[0])
    return _bytes(values.astype("<f2"))


def _bytes(values: Array) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")
