"""Rows as a trainer records them, with a fault planted between engine and trainer: policies over few tokens,
whose distributions are known."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = Any
Row = dict[str, Any]
PROMPTS, SAMPLES, WIDTH, VOCABULARY = 24, 6, 24, 24
STOP = 0
FIRST_ID = 10
"""Ids of the file less tokens of the policy."""


@dataclass(frozen=True)
class Planted:
    """How engine and trainer differ; logits are ``[..., V]``."""

    noise: float = 0.03
    """Of the engine's logits: its precision."""
    temperature: float = 1.0
    """At which the trainer scores."""
    engine_temperature: float | None = None
    narrowed: Callable[[Array, Array], Array] = lambda logits, positions: logits
    """Logits that the engine samples from, and those of its log-probs unless it reports raw ones."""
    is_raw: bool = False
    changed: Callable[[list[Row], np.random.Generator], None] = lambda rows, chance: None
    """What becomes of rows behind the engine."""
    extra_noise: Callable[[Array, int], Array] = lambda rows, step: np.zeros(len(rows))
    """Further noise of each row's engine: other weights."""
    fields: Mapping[str, Callable[[int, int], int]] = field(default_factory=dict)
    """Fields of rows from the number of a row and its step."""
    changed_rows: int = 0
    """Of every so many rows, the first token is another one when the trainer scores it."""
    likely_stop: float = -0.5
    """Log-odds of the stop token where it is likely."""
    sharpest: float = 2.0
    """Logarithm of the largest standard deviation of logits."""


def log_softmax(logits: Array) -> Array:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def rows_of(plan: Planted, seed: int, step: int, num_prompts: int = PROMPTS) -> list[Row]:
    """Six samples of each prompt; the distribution of a token depends on prompt, position and the token
    before it."""
    chance = np.random.default_rng([seed, step])
    shape = (num_prompts, WIDTH, VOCABULARY, VOCABULARY)
    sharpness = np.exp(chance.uniform(-0.7, plan.sharpest, (num_prompts, WIDTH, VOCABULARY, 1)))
    logits = sharpness * chance.standard_normal(shape)
    # A stop token that is likely at some places.
    logits[..., STOP] += np.log(np.exp(logits).sum(-1)) - logits[..., STOP]
    logits[..., STOP] += chance.choice([-9.0, -4.0, plan.likely_stop], shape[:3], p=[0.7, 0.2, 0.1])
    engine = logits + plan.noise * chance.standard_normal(shape)
    other = chance.standard_normal(shape)
    count = num_prompts * SAMPLES
    prompts, before = np.repeat(np.arange(num_prompts), SAMPLES), np.ones(count, int)
    scored_before, extra = before.copy(), plan.extra_noise(np.arange(count), step)[:, None]
    is_changed = np.arange(count) % max(plan.changed_rows, 1) == 1
    columns: dict[str, list[Array]] = {}
    for position in range(WIDTH):
        where = (prompts, position, before)
        engine_logits = engine[where] + extra * other[where]
        tempered = engine_logits / (plan.engine_temperature or plan.temperature)
        sampled = log_softmax(plan.narrowed(tempered, np.full(count, position)))
        tokens = (np.exp(sampled).cumsum(-1) > chance.random((count, 1))).argmax(-1)
        reported = log_softmax(engine_logits) if plan.is_raw else sampled
        train = log_softmax(logits[prompts, position, scored_before] / plan.temperature)
        scored = np.where(is_changed & (position == 0), train.argmin(-1), tokens)
        probability, place = np.exp(train), (np.arange(count), scored)
        entropy = -(probability * train).sum(-1)
        step_columns = {
            "response_ids": scored,
            "rollout_log_prob": reported[np.arange(count), tokens],
            "old_log_prob": train[place],
            "entropy": entropy,
            "sum_pi_squared": (probability**2).sum(-1),
            "varentropy": (probability * (train + entropy[:, None]) ** 2).sum(-1),
            "_token": tokens,
        }
        for name, values in step_columns.items():
            columns.setdefault(name, []).append(values)
        before, scored_before = tokens, scored
    table = {name: np.stack(values, 1) for name, values in columns.items()}
    rows = []
    for index in range(count):
        stops = np.flatnonzero(table["_token"][index] == STOP)
        length = int(stops[0]) + 1 if len(stops) else WIDTH
        row: Row = {
            name: values[index, :length].astype("float32").tolist()
            for name, values in table.items()
            if name not in ("response_ids", "_token")
        }
        row |= {
            "prompt_ids": [7, int(prompts[index]), 9],
            "response_ids": (FIRST_ID + table["response_ids"][index, :length]).tolist(),
            "response_mask": [1] * length,
            "advantage": [1.0 - 2.0 * (index % 2)] * length,
            "score": float(index % 2),
            "finished": len(stops) > 0,
            "step": step,
            **{name: value(index, step) for name, value in plan.fields.items()},
        }
        rows.append(row)
    plan.changed(rows, chance)
    return rows


def top_p(share: float) -> Callable[[Array, Array], Array]:
    """The most likely tokens that hold this share together."""

    def narrowed(logits: Array, _: Array) -> Array:
        order = np.argsort(-logits, -1)
        ordered = np.exp(np.take_along_axis(log_softmax(logits), order, -1))
        outside = np.take_along_axis(ordered.cumsum(-1) - ordered >= share, order.argsort(-1), -1)
        return np.where(outside, -1e9, logits)

    return narrowed


def top_k(count: int) -> Callable[[Array, Array], Array]:
    """So many of the most likely tokens."""
    return lambda logits, _: np.where(logits < np.sort(logits, -1)[:, [-count]], -1e9, logits)


def min_p(share: float) -> Callable[[Array, Array], Array]:
    """Tokens that are at least so likely, relative to the most likely one."""
    return lambda logits, _: np.where(logits < logits.max(-1, keepdims=True) + np.log(share), -1e9, logits)


def stop_banned(last: int) -> Callable[[Array, Array], Array]:
    """No stop token before this position."""

    def narrowed(logits: Array, positions: Array) -> Array:
        logits = logits.copy()
        logits[positions < last, STOP] = -1e9
        return logits

    return narrowed


def shifted(rows: list[Row], _: np.random.Generator, share: float = 1.0) -> None:
    """Log-probs of this share of the rows belong to the tokens before."""
    for row in rows[: round(share * len(rows))]:
        row["rollout_log_prob"] = row["rollout_log_prob"][-1:] + row["rollout_log_prob"][:-1]


def rounded(rows: list[Row], _: np.random.Generator) -> None:
    """Log-probs of the engine in bfloat16."""
    for row in rows:
        bits = np.array(row["rollout_log_prob"], "float32").view("uint32") + 0x8000
        row["rollout_log_prob"] = (bits & 0xFFFF0000).astype("uint32").view("float32").tolist()


def not_finite(rows: list[Row], chance: np.random.Generator) -> None:
    """One log-prob in 2 % of the rows is NaN."""
    for row in rows:
        if chance.random() < 0.02:
            row["rollout_log_prob"][0] = float("nan")


def without_stop(rows: list[Row], chance: np.random.Generator) -> None:
    """The stop token of every third row is lost, its log-probs with it."""
    for row in rows[::3]:
        if row["finished"] and len(row["response_ids"]) > 1:
            for name, values in row.items():
                if isinstance(values, list) and name != "prompt_ids":
                    row[name] = values[:-1]


def without_stop_shifted(rows: list[Row], chance: np.random.Generator) -> None:
    """As ``without_stop``, and the log-probs of these rows are shifted."""
    without_stop(rows, chance)
    shifted(rows[::3], chance)


def returned_twice(rows: list[Row], _: np.random.Generator) -> None:
    """A row's completion is that of another prompt's request, too."""
    longest = max(rows[10:], key=lambda row: len(row["response_ids"]))
    rows[0] |= {name: values for name, values in longest.items() if name != "prompt_ids"}


PLANS: Mapping[str, Planted] = {
    "healthy bf16": Planted(),
    "healthy fp8": Planted(noise=0.09),
    "healthy fp32": Planted(noise=1e-6),
    "temperature 0.9": Planted(engine_temperature=0.9),
    "temperature 0.98": Planted(engine_temperature=0.98, noise=0.01),
    "raw at 0.7": Planted(temperature=0.7, is_raw=True),
    "top-p 0.95": Planted(narrowed=top_p(0.95)),
    "top-p 0.9": Planted(narrowed=top_p(0.9)),
    "top-k 5": Planted(narrowed=top_k(5)),
    "min-p 0.05": Planted(narrowed=min_p(0.05)),
    # R² 0.64, which a banned token has, too.
    "min-p 0.3 of flat policies": Planted(narrowed=min_p(0.3), noise=0.003, sharpest=0.3, likely_stop=-4.0),
    "top-p 0.7 raw": Planted(narrowed=top_p(0.7), is_raw=True),
    "log-probs shifted": Planted(changed=shifted),
    "tokens changed": Planted(changed_rows=16, noise=0.003, sharpest=1.4),
    "bf16 transport": Planted(changed=rounded),
    "one engine of two stale": Planted(
        extra_noise=lambda rows, step: 0.2 * (rows % 2), fields={"engine": lambda row, step: row % 2}
    ),
    "stop token banned": Planted(narrowed=stop_banned(12), likely_stop=2.0),
    "age 4": Planted(
        extra_noise=lambda rows, step: 0.08 * (rows % 5) ** 0.5,
        fields={"version": lambda row, step: step - 1 - row % 5},
    ),
    "half a tensor": Planted(extra_noise=lambda rows, step: 0.06 + 0 * rows),
    "NaN": Planted(changed=not_finite),
    "stop token lost": Planted(changed=without_stop),
    "stop token lost, log-probs shifted": Planted(changed=without_stop_shifted),
    "a completion returned twice": Planted(changed=returned_twice),
}
