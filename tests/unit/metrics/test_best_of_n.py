"""Best, worst and majority of n samples against every possible draw, one by one."""

import itertools
import math
import random
import statistics
from collections import Counter

import pytest

from verl_rc.metrics.best_of_n import (
    LARGEST_ENUMERATED_VOTE,
    MeanAndStd,
    ValidationSample,
    best_of,
    draw_sizes,
    majority_of,
    summarise_samples,
    winning_probabilities,
    worst_of,
)

VALUES = ([0.0, 0.0, 1.0], [1.5, -2.0, 0.25, 1.5], [3.0], [0.1, 0.2, 0.3, 0.4, 0.7])


def over_all_draws(outcome, size, draws):
    """Mean and population standard deviation of ``outcome(indices)`` over all ``size ** draws`` sequences of
    draws."""
    outcomes = [outcome(indices) for indices in itertools.product(range(size), repeat=draws)]
    return pytest.approx((statistics.fmean(outcomes), statistics.pstdev(outcomes)), abs=1e-12)


def first_drawn_majority(values, answers):
    """The rule in words: count, the first drawn of the most frequent answers wins, with the value it was
    first drawn with."""

    def outcome(indices):
        counts = Counter(answers[index] for index in indices)
        return next(values[index] for index in indices if counts[answers[index]] == max(counts.values()))

    return outcome


def test_best_and_worst_by_hand():
    # Two draws out of 0, 0, 1 miss the 1 with probability (2/3)^2; both are the 1 with probability (1/3)^2.
    assert best_of([0.0, 1.0, 0.0], 2) == pytest.approx((5 / 9, math.sqrt(5 / 9 * 4 / 9)))
    assert worst_of([0.0, 1.0, 0.0], 2) == pytest.approx((1 / 9, math.sqrt(1 / 9 * 8 / 9)))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("draws", [1, 2, 3, 5])
def test_best_and_worst_of_all_draws(values, draws):
    assert best_of(values, draws) == over_all_draws(
        lambda indices: max(values[i] for i in indices), len(values), draws
    )
    assert worst_of(values, draws) == over_all_draws(
        lambda indices: min(values[i] for i in indices), len(values), draws
    )


def test_majority_by_hand():
    # Three draws out of a, a, b: a wins with two or three of them, 3 (2/3)^2 (1/3) + (2/3)^3 = 20/27.
    assert majority_of([1.0, 1.0, 0.0], ["a", "a", "b"], 3) == pytest.approx(
        (20 / 27, math.sqrt(20 / 27 * 7 / 27))
    )
    # Of two draws, a tie (probability 4/9) counts half: 4/9 + 2/9.
    assert majority_of([1.0, 1.0, 0.0], ["a", "a", "b"], 2).mean == pytest.approx(2 / 3)
    assert winning_probabilities((1, 2), 2) == pytest.approx({1: 1 / 3, 2: 2 / 3})


@pytest.mark.parametrize(
    ("values", "answers"),
    [
        ([1.0, 0.0, 0.0, 1.0], ["a", "b", "c", "a"]),
        ([1.0, 0.0, 0.0, 1.0, 0.0], ["a", "b", "c", "a", "b"]),
        ([0.9, 0.4, -1.0, 0.7, 0.1], ["a", "a", "a", "b", "b"]),
        ([0.9, 0.4, -1.0, 0.7, 0.1], ["a", "b", "c", "d", "e"]),
        ([0.5, 0.0, 0.0], ["a", None, None]),
    ],
)
@pytest.mark.parametrize("draws", [1, 2, 3, 4, 6])
def test_majority_of_all_draws(values, answers, draws):
    assert majority_of(values, answers, draws) == over_all_draws(
        first_drawn_majority(values, answers), len(values), draws
    )


@pytest.mark.parametrize("counts", [(1,) * 16, (1, 1, 2, 3, 9), (8, 8), (64,), (1, 3, 4, 4, 20, 32)])
@pytest.mark.parametrize("draws", [2, 7, 16])
def test_exactly_one_answer_wins(counts, draws):
    chances = winning_probabilities(counts, draws)
    assert math.fsum(chances[count] for count in counts) == pytest.approx(1.0, abs=1e-12)


def test_a_vote_of_many_samples_is_estimated_the_same_every_time():
    many = LARGEST_ENUMERATED_VOTE * 2
    answers = ["a"] * (many // 2) + ["b"] * (many // 4) + ["c"] * (many // 4)
    values = [float(answer == "a") for answer in answers]
    estimate = majority_of(values, answers, 4)
    exact = majority_of([1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "c"], 4)  # the same shares
    assert estimate.mean == pytest.approx(exact.mean, abs=0.05)  # 0.3 / sqrt(1000) is one standard error
    assert estimate.mean != exact.mean
    winning_probabilities.cache_clear()
    assert majority_of(values, answers, 4) == estimate


@pytest.mark.parametrize(
    ("samples", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (16, [2, 4, 8, 16])]
)
def test_draw_sizes_are_powers_of_two_and_all_samples(samples, sizes):
    assert draw_sizes(samples) == sizes


def test_prompts_are_averaged_and_each_counts_once():
    values = [("p", 0.0), ("q", 3.0), ("p", 1.0), ("q", 3.0), ("p", 0.0), ("q", 3.0)]
    samples = [ValidationSample(prompt, value) for prompt, value in values]
    summary = summarise_samples(samples, 3)
    extremes = {
        f"{kind}@{n}/{moment}" for kind in ("best", "worst") for n in (2, 3) for moment in ("mean", "std")
    }
    assert set(summary) == {"mean@3", "std@3"} | extremes
    assert summary["mean@3"] == pytest.approx((1 / 3 + 3) / 2)
    assert summary["std@3"] == pytest.approx(
        (math.sqrt(1 / 3) + 0) / 2
    )  # unbiased: (1/9 + 4/9 + 1/9) / 2 = 1/3
    assert summary["best@2/mean"] == pytest.approx((5 / 9 + 3) / 2)
    assert summary["worst@3/mean"] == pytest.approx((1 / 27 + 3) / 2)


def test_one_sample_has_only_a_mean():
    assert summarise_samples([ValidationSample(0, 0.5, "a"), ValidationSample(1, 1.0, "b")], 1) == {
        "mean@1": 0.75
    }
    assert summarise_samples([], 4) == {}


def test_a_prompt_with_samples_missing_is_judged_by_those_there():
    summary = summarise_samples(
        [ValidationSample(0, 2.0), ValidationSample(1, 0.0), ValidationSample(1, 1.0)], 4
    )
    assert summary["mean@4"] == 1.25
    assert summary["std@4"] == pytest.approx(math.sqrt(0.5) / 2)
    assert summary["best@4/mean"] == pytest.approx((2 + 15 / 16) / 2)


def test_majority_needs_an_answer():
    unanswered = summarise_samples([ValidationSample(0, 1.0), ValidationSample(0, 0.0)], 2)
    assert not [name for name in unanswered if name.startswith("maj")]
    one = summarise_samples(
        [ValidationSample(0, 1.0, "a"), ValidationSample(0, 0.0), ValidationSample(0, 0.0)], 3
    )
    assert one["maj@3/mean"] == pytest.approx(7 / 27)  # no answer, given twice, wins with 20/27


def test_the_order_of_samples_does_not_matter():
    draw = random.Random(7)
    samples = [
        ValidationSample(prompt, draw.gauss(0, 1), draw.choice("abc"))
        for prompt in range(5)
        for _ in range(8)
    ]
    expected = summarise_samples(samples, 8)
    for _ in range(5):
        draw.shuffle(samples)
        assert summarise_samples(samples, 8) == expected


def test_moments_are_named():
    assert best_of([2.0], 4) == MeanAndStd(mean=2.0, std=0.0)
