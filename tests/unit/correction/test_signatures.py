"""Signatures against plain loops in Python floats, and against policies over a few tokens in which one cause
is planted."""

import functools
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from appendix_a import random_case
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionStatistics, SequenceContext, compute_rollout_correction, measure
from verl_rc.metrics.log_ratio_bins import NUM_BINS
from verl_rc.metrics.signatures import concentration

FULL = RolloutCorrectionConfig(diagnostics="full")
PREFIX = "rollout_corr/"
NAMES = (
    "missing_mass",
    "missing_mass_z",
    "lag",
    "rounded_fraction",
    "concentration",
    "temperature_slope",
    "temperature_r2",
    "temperature_z",
    "surprisal_excess",
    "surprisal_excess_bound",
    "logit_noise",
)


FACTS = ("entropies", "sum_pi_squared", "varentropies")
"""What the signatures need of the trainer's distributions."""


def signatures(train: Tensor, rollout: Tensor, mask: Tensor, *facts: Tensor) -> dict[str, float]:
    found = compute_rollout_correction(
        train, rollout, mask, FULL, **dict(zip(FACTS, facts, strict=True))
    ).metrics()
    wanted = {name for name in found if "position_" in name} | {f"{PREFIX}{name}" for name in NAMES}
    return {name.removeprefix(PREFIX): value for name, value in found.items() if name in wanted}


# ---- Plain loops.


def quotient(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """``sum a / sum b`` over rows and its standard error: the delta method for a ratio of two means."""
    value = math.fsum(a for a, _ in pairs) / math.fsum(b for _, b in pairs)
    return value, math.sqrt(math.fsum((a - value * b) ** 2 for a, b in pairs)) / math.fsum(
        b for _, b in pairs
    )


def drawn(positions: list[int]) -> dict[int, int]:
    """What tokens of a row count: all of the first 16 one, then every 8th eight, from 256 on every 64th
    sixty-four."""
    rules = ((0, 16, 0, 1), (16, 256, 20, 8), (256, 10**9, 288, 64))
    return {
        t: n for low, high, first, n in rules for t in positions if low <= t < high and (t - first) % n == 0
    }


def by_hand(train: Tensor, rollout: Tensor, mask: Tensor, *facts: Tensor) -> dict[str, float]:
    rows = []
    for row in zip(*(values.tolist() for values in (train, rollout, *facts, mask)), strict=True):
        columns = zip(*row, strict=True)
        rows.append({t: numbers for t, (*numbers, there) in enumerate(columns) if there})
    rows = [row for row in rows if row]
    tokens = [(t, *numbers) for row in rows for t, numbers in row.items()]
    weights = [drawn(list(row)) for row in rows]
    weighted = [(w, t, *row[t]) for row, some in zip(rows, weights, strict=True) for t, w in some.items()]
    ratios = {id(row): {t: pi - mu for t, (pi, mu, *_) in row.items()} for row in rows}
    us = {id(row): {t: pi + h for t, (pi, _, h, *_) in row.items()} for row in rows}
    found: dict[str, float] = {}
    found["missing_mass"], error = quotient(
        [(math.fsum(1 - math.exp(x) for x in ratios[id(r)].values()), len(r)) for r in rows]
    )
    found["missing_mass_z"] = found["missing_mass"] / error
    slopes = [
        (
            math.fsum(w * ratios[id(r)][t] * us[id(r)][t] for t, w in some.items()),
            math.fsum(w * us[id(r)][t] ** 2 for t, w in some.items()),
        )
        for r, some in zip(rows, weights, strict=True)
    ]
    found["temperature_slope"], error = quotient(slopes)
    found["temperature_z"] = found["temperature_slope"] / error
    square = math.fsum(w * (pi - mu) ** 2 for w, _, pi, mu, *_ in weighted)
    found["temperature_r2"] = math.fsum(a for a, _ in slopes) ** 2 / (
        math.fsum(b for _, b in slopes) * square
    )
    surprisals = [
        -math.fsum(w * us[id(r)][t] for t, w in some.items()) for r, some in zip(rows, weights, strict=True)
    ]
    whole = math.fsum(w for w, *_ in weighted)
    found["surprisal_excess"] = math.fsum(surprisals) / whole
    spread = math.sqrt(math.fsum(w * v for w, *_, v in weighted) / whole)
    chance = max(
        math.fsum(w * w * x for w, x in pairs)
        for pairs in (
            [(w, v) for w, *_, v in weighted],
            [(w, (pi + h) ** 2) for w, _, pi, _, h, *_ in weighted],
        )
    )
    error = math.sqrt(chance) / whole
    reciprocal = statistics.fmean(math.exp(mu - pi) for _, pi, mu, *_ in tokens)
    found["surprisal_excess_bound"] = math.sqrt(max(reciprocal - 1, 0)) * spread + 6 * error

    def noise(low: float, high: float) -> float | None:
        some = [
            (w, pi - mu, 1 - 2 * math.exp(pi) + q) for w, t, pi, mu, _, q, _ in weighted if low <= t < high
        ]
        return (
            math.sqrt(math.fsum(w * x * x for w, x, _ in some) / math.fsum(w * g for w, _, g in some))
            if some
            else None
        )

    edges = itertools.pairwise((0, 16, 256, math.inf))
    parts = {"logit_noise": noise(0, math.inf)} | {
        f"position_{n}_logit_noise": noise(*edge) for n, edge in enumerate(edges)
    }
    found |= {name: value for name, value in parts.items() if value is not None}
    distances = {
        lag: [abs(r[t][0] - r[t + lag][1]) for r in rows for t in r if t < 8 and t + lag < 8 and t + lag in r]
        for lag in (-2, -1, 0, 1, 2)
    }
    means = {lag: statistics.fmean(values) for lag, values in distances.items() if values}
    best = min(means, key=lambda lag: means[lag])
    found["lag"] = best if means[best] < means[0] / 2 else 0
    found["rounded_fraction"] = 0.0
    return found


def random_facts(train: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies, sums of squared probabilities that are not below the square of the token's own, and
    varentropies."""
    generator = torch.Generator().manual_seed(seed)
    entropies, extra, varentropies = torch.rand(3, *train.shape, generator=generator, dtype=torch.float64)
    return 2 * entropies, (2 * train).exp() + 0.1 * extra, varentropies


@pytest.mark.parametrize(("width", "seed"), [(5, 0), (90, 1), (90, 2), (300, 3)])
def test_signatures_are_those_of_a_loop(width: int, seed: int) -> None:
    train, rollout, mask = random_case(9, width, seed)
    mask &= (
        torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.9
    )  # tool tokens are holes in it
    facts = random_facts(train, seed)
    expected = by_hand(train, rollout, mask, *facts)
    unread = torch.where(mask, 0.0, torch.nan)
    found = signatures(
        *(values + unread for values in (train, rollout)), mask, *(values + unread for values in facts)
    )
    found.pop("concentration")
    assert found.pop("surprisal_excess_bound") == pytest.approx(
        expected.pop("surprisal_excess_bound"), rel=0.02
    )
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_largest_hundredth_of_the_tokens() -> None:
    """A thousand log-ratios of 0.1 and ten of 1: 10.1 tokens have 10 and a tenth of 0.01 of 10 + 1,000 x
    0.01."""
    train = torch.full((1, 1010), -2.0, dtype=torch.float64)
    logs = torch.full_like(train, 0.1)
    logs[0, ::101] = -1.0
    found = compute_rollout_correction(train, train - logs, torch.ones(1, 1010), FULL).metrics()[
        f"{PREFIX}concentration"
    ]
    assert found == pytest.approx((10 + 0.1 * 0.01) / 20, rel=0.04)
    assert concentration([0.0] * NUM_BINS) == 0.0


def metrics_of_parts(case: tuple[Tensor, ...], facts: dict[str, Tensor], cut: int) -> dict[str, float]:
    """Metrics of rows that were measured in two parts."""

    def part(rows: slice) -> CorrectionStatistics:
        context = SequenceContext(**{name: values[rows] for name, values in facts.items()})
        return measure(*(values[rows] for values in case), FULL, context)

    return part(slice(cut)).merge(part(slice(cut, None))).metrics(FULL)


@given(seed=st.integers(0, 10_000), cut=st.integers(0, 6))
def test_parts_order_and_padding_do_not_count(seed: int, cut: int) -> None:
    case = random_case(6, 70, seed)
    facts = random_facts(case[0], seed)
    whole = signatures(*case, *facts)
    merged = metrics_of_parts(case, dict(zip(FACTS, facts, strict=True)), cut)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    padded = [torch.nn.functional.pad(values[order], (0, 9, 0, 2)) for values in (*case, *facts)]
    for name, value in signatures(*padded).items():
        assert value == pytest.approx(whole[name], rel=1e-8, abs=1e-11), name
        assert merged[f"{PREFIX}{name}"] == pytest.approx(whole[name], rel=1e-8, abs=1e-11), name


ENGINES = (
    "engine_0_logit_noise",
    "engine_2_logit_noise",
    "noisiest_engine",
    "noisiest_engine_ratio",
    "noisiest_engine_z",
)


@given(seed=st.integers(0, 10_000), cut=st.integers(0, 8))
def test_engines_are_compared_over_their_rows_and_parts_add_up(seed: int, cut: int) -> None:
    """Engines 0 and 2; the gap of the latter is four times as large."""
    train, rollout, mask = random_case(8, 70, seed)
    mask[:, 0] = 1.0
    engines = torch.tensor([0, 2, 0, 0, 2, 2, 0, 2])
    rollout = torch.where((engines == 2)[:, None], train + 4 * (rollout - train), rollout)
    facts = dict(zip(FACTS, random_facts(train, seed), strict=True)) | {"engines": engines}
    found = compute_rollout_correction(train, rollout, mask, FULL, **facts).metrics()
    found = {name: found[f"{PREFIX}{name}"] for name in ENGINES}
    pairs: dict[int, list[tuple[float, float]]] = {0: [], 2: []}
    columns = (train, rollout, facts["sum_pi_squared"], mask, engines)
    for pi, mu, q, there, engine in zip(*(values.tolist() for values in columns), strict=True):
        weights = drawn([t for t, one in enumerate(there) if one]).items()
        sums = ((w * (pi[t] - mu[t]) ** 2, w * (1 - 2 * math.exp(pi[t]) + q[t])) for t, w in weights)
        pairs[engine].append(tuple(map(math.fsum, zip(*sums, strict=True))))  # type: ignore[arg-type]
    (value, error), (other, of_other) = sorted((quotient(rows) for rows in pairs.values()), reverse=True)
    expected = [math.sqrt(quotient(rows)[0]) for rows in pairs.values()]
    expected += [2.0 if quotient(pairs[2])[0] == value else 0.0, math.sqrt(value / other)]
    expected.append((value - 4 * other) / math.hypot(error, 4 * of_other))
    assert list(found.values()) == pytest.approx(expected, rel=1e-6)
    merged = metrics_of_parts((train, rollout, mask), facts, cut)
    assert [merged[f"{PREFIX}{name}"] for name in ENGINES] == pytest.approx(list(found.values()), rel=1e-8)


def test_a_batch_of_zero_width_says_what_an_empty_mask_says() -> None:
    empty, masked = (
        compute_rollout_correction(
            train_log_probs=torch.zeros(2, width),
            rollout_log_probs=torch.zeros(2, width),
            response_mask=torch.zeros(2, width, dtype=torch.bool),
            config=FULL,
        ).metrics()
        for width in (0, 3)
    )
    assert empty == pytest.approx(masked, nan_ok=True)


def test_without_entropies_what_needs_them_is_left_out() -> None:
    case = random_case(4, 5, 0)
    found = compute_rollout_correction(*case, FULL).metrics()
    assert {name for name in NAMES if f"{PREFIX}{name}" in found} == {
        "missing_mass",
        "missing_mass_z",
        "lag",
        "rounded_fraction",
        "concentration",
    }
    bypass = compute_rollout_correction(*case, FULL.model_copy(update={"bypass_mode": True})).metrics()
    assert not any(f"{PREFIX}{name}" in bypass for name in NAMES)


# ---- Planted causes: policies over a few tokens, whose distributions are known.

ROWS, WIDTH, VOCABULARY = 400, 32, 24


@functools.cache
def logits() -> Tensor:
    return 2.0 * torch.randn(
        ROWS, WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )


def measured(sampled: Tensor, reported: Tensor | None = None, change: Any = None) -> dict[str, float]:
    """Signatures of tokens that are drawn from ``sampled`` log-probs, the trainer's being those of
    ``logits()``."""
    train = logits().log_softmax(-1)
    tokens = torch.multinomial(
        sampled.exp().flatten(0, 1), 1, generator=torch.Generator().manual_seed(4)
    ).view(ROWS, WIDTH, 1)
    rollout = (sampled if reported is None else reported).gather(-1, tokens)[..., 0].float()
    of_trainer = train.gather(-1, tokens)[..., 0].float()
    rollout = rollout if change is None else change(rollout)
    return signatures(of_trainer, rollout, torch.ones(ROWS, WIDTH), *facts_of(train))


def facts_of(log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies, sums of squared probabilities and varentropies of distributions ``[..., V]``."""
    probs = log_probs.exp()
    entropies = -(probs * log_probs).sum(-1)
    varentropies = (probs * (log_probs + entropies[..., None]).square()).sum(-1)
    return entropies.float(), probs.square().sum(-1).float(), varentropies.float()


def noisy(scale: float, seed: int = 5) -> Tensor:
    """The trainer's logits with independent noise of this size on each."""
    noise = torch.randn(logits().shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (logits() + scale * noise).log_softmax(-1)


@pytest.mark.parametrize("scale", [0.01, 0.04])
def test_noise_on_the_logits_is_found_and_nothing_else(scale: float) -> None:
    found = measured(noisy(scale))
    assert found["logit_noise"] == pytest.approx(scale, rel=0.04)
    assert found["position_0_logit_noise"] == pytest.approx(scale, rel=0.06)
    assert found["position_1_logit_noise"] == pytest.approx(scale, rel=0.06)
    assert abs(found["missing_mass_z"]) < 4
    assert abs(found["temperature_slope"]) < 2e-3
    assert found["temperature_r2"] < 0.01
    assert abs(found["surprisal_excess"]) < found["surprisal_excess_bound"]
    assert found["lag"] == 0
    assert found["rounded_fraction"] < 1e-3


@pytest.mark.parametrize("temperature", [1.02, 0.98, 0.9])
def test_another_temperature(temperature: float) -> None:
    found = measured((logits() / temperature).log_softmax(-1))
    assert found["temperature_slope"] == pytest.approx(1 - 1 / temperature, rel=0.05)
    assert found["temperature_r2"] > 0.9
    assert abs(found["temperature_z"]) > 30
    assert abs(found["missing_mass_z"]) < 6


def without_tail(log_probs: Tensor, kept_mass: float) -> Tensor:
    """Top-p: the most likely tokens that hold ``kept_mass`` together, normalised."""
    ordered, order = log_probs.sort(dim=-1, descending=True)
    outside = ordered.exp().cumsum(-1) - ordered.exp() >= kept_mass
    return log_probs.masked_fill(outside.gather(-1, order.argsort(-1)), -torch.inf).log_softmax(-1)


def test_a_filter_that_is_not_mirrored_leaves_out_the_mass_it_drops() -> None:
    train = logits().log_softmax(-1)
    kept = without_tail(train, 0.95)
    found = measured(kept)
    dropped = 1 - train.exp().where(kept > -torch.inf, 0.0).sum(-1)
    assert found["missing_mass"] == pytest.approx(float(dropped.mean()), rel=0.05)
    assert found["missing_mass_z"] > 30
    assert found["temperature_r2"] < 0.3


@pytest.mark.parametrize("narrowed", ["temperature", "filter"])
def test_raw_log_probs_of_a_narrower_policy(narrowed: str) -> None:
    train = noisy(0.01)
    sampled = (logits() / 0.8).log_softmax(-1) if narrowed == "temperature" else without_tail(train, 0.9)
    found = measured(sampled, reported=train)
    assert found["surprisal_excess"] < -1.5 * found["surprisal_excess_bound"]
    assert found["logit_noise"] < 0.012


def test_a_policy_that_is_certain_of_most_tokens_may_draw_no_unlikely_one() -> None:
    """Of 96 rows with four tokens, one in three has a token of probability 0.97. Two steps in five hold no
    unlikely token."""
    likely = torch.full((96, 4), 1 - 1e-6, dtype=torch.float64)
    likely[::3, 1] = 0.97
    log_probs = torch.stack([likely, 1 - likely], dim=-1).log()
    facts, few = facts_of(log_probs), 0
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.multinomial(log_probs.exp().flatten(0, 1), 1, generator=generator).view(96, 4, 1)
        drawn_ones = log_probs.gather(-1, tokens)[..., 0].float()
        found = signatures(drawn_ones, drawn_ones, torch.ones(96, 4), *facts)
        assert abs(found["surprisal_excess"]) < found["surprisal_excess_bound"], seed
        few += not tokens.any()
    assert few > 60


def test_a_policy_that_is_certain_of_everything_may_draw_an_unlikely_token() -> None:
    """Of 384 tokens 0.02 unlikely ones are expected, and one is drawn: it is alone more than what the others
    vary by."""
    likely = torch.full((96, 4), 1 - 0.02 / 384, dtype=torch.float64)
    log_probs = torch.stack([likely, 1 - likely], dim=-1).log()
    drawn_ones = log_probs[..., 0].float()
    drawn_ones[3, 2] = log_probs[3, 2, 1]
    found = signatures(drawn_ones, drawn_ones, torch.ones(96, 4), *facts_of(log_probs))
    assert 0.02 < found["surprisal_excess"] < found["surprisal_excess_bound"]


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_shifted_log_probs(shift: int) -> None:
    """Rolled by k, the log-prob of token t stands at t + k."""
    assert measured(noisy(0.02), change=lambda rollout: rollout.roll(shift, dims=1))["lag"] == shift


def test_log_probs_that_are_all_alike_are_not_shifted() -> None:
    train = -0.04 * torch.rand(8, 20, generator=torch.Generator().manual_seed(0))
    found = [
        compute_rollout_correction(
            scale * train, scale * train.roll(1, dims=1), torch.ones(8, 20), FULL
        ).metrics()
        for scale in (1.0, 10.0)
    ]
    assert [metrics[f"{PREFIX}lag"] for metrics in found] == [0, 1]


def test_log_probs_of_other_tokens_are_nearest_at_some_lag_but_not_shifted() -> None:
    generator = torch.Generator().manual_seed(0)
    found = [
        compute_rollout_correction(
            *-torch.rand(2, 8, 20, generator=generator), torch.ones(8, 20), FULL
        ).metrics()
        for _ in range(8)
    ]
    assert [metrics[f"{PREFIX}lag"] for metrics in found] == [0] * 8


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_log_probs_that_were_rounded_on_their_way(precision: torch.dtype) -> None:
    assert (
        measured(noisy(0.02), change=lambda rollout: rollout.to(precision).float())["rounded_fraction"] == 1.0
    )
    assert measured(noisy(0.02), change=lambda rollout: rollout.to(precision))["rounded_fraction"] == 1.0


def test_logits_that_were_rounded_to_bfloat16() -> None:
    """Rounding is uniform: of logits from 2^e to 2^(e+1) it has the standard deviation 2^(e-7) / sqrt(12)."""
    rounded = logits().bfloat16().double()
    steps = 2.0 ** (logits().abs().log2().floor() - 7)
    found = measured(rounded.log_softmax(-1))
    # Of a token's own logit and of all others, by the law: weights are the squares of the gradient.
    probabilities = logits().softmax(-1)
    own, others = (1 - probabilities) ** 2 * probabilities, probabilities**2 * (1 - probabilities)
    weights = own + others
    expected = ((steps**2 / 12 * weights).sum() / weights.sum()).sqrt()
    assert found["logit_noise"] == pytest.approx(float(expected), rel=0.04)


def test_a_few_other_tokens_are_concentrated() -> None:
    def changed(rollout: Tensor) -> Tensor:
        rollout = rollout.clone()
        rollout[:4, :16] -= 3.0  # 64 of 12,800 tokens
        return rollout

    assert measured(noisy(0.02), change=changed)["concentration"] > 0.95
    assert measured(noisy(0.02))["concentration"] < 0.2


def ages() -> Iterator[float]:
    """Logit noise after one to four updates that each move every logit by 0.02."""
    moved = logits()
    for seed in range(10, 14):  # not the numbers that the logits are made of
        moved = moved + 0.02 * torch.randn(
            moved.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        yield measured(moved.log_softmax(-1))["logit_noise"]


def test_old_weights_show_as_logit_noise_that_grows_with_their_age() -> None:
    assert [noise / 0.02 for noise in ages()] == pytest.approx(
        [math.sqrt(age) for age in (1, 2, 3, 4)], rel=0.04
    )


def test_facts_must_fit_the_tokens() -> None:
    case = random_case(3, 4, 0)
    for name in FACTS:
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            compute_rollout_correction(*case, FULL, **{name: torch.zeros(3)})
