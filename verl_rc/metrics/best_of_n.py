"""Statistics of several samples per prompt: mean, standard deviation, and the expected best, worst and
majority of n."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LARGEST_ENUMERATED_VOTE = 64
"""Largest number of samples of a prompt for enumerated majority votes; above it, ``SIMULATED_VOTES`` votes
estimate them."""
SIMULATED_VOTES = 1000
"""Votes drawn for that estimate."""
VOTE_SEED = 42
"""Seed of that estimate."""


@dataclass(frozen=True)
class ValidationSample:
    """One sample of a validation prompt, scored."""

    prompt: Hashable
    """The prompt that it answers; samples of one prompt need not be adjacent."""
    value: float
    """Finite."""
    answer: str | None = None
    """The answer it votes for; None (no answer) is a vote too."""


class MeanAndStd(NamedTuple):
    """Mean and (population) standard deviation of a random value."""

    mean: float
    std: float


def summarise_samples(samples: Iterable[ValidationSample], samples_per_prompt: int) -> dict[str, float]:
    """Statistics of every prompt's samples, averaged over prompts, each prompt counting once.

    With N = ``samples_per_prompt``: ``mean@N`` and, for N > 1, ``std@N`` (root of the unbiased variance, N -
    1 in the denominator; 0 for a single value) and ``{best,worst,maj}@n/{mean,std}`` for every n of
    ``draw_sizes(N)``. ``maj`` is left out when no sample has an answer. A prompt with fewer than N samples is
    judged by those. Sums are not rounded: the order of the samples does not matter. Without samples the
    result is empty.
    """
    by_prompt: dict[Hashable, list[ValidationSample]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample.prompt].append(sample)
    with_vote = any(sample.answer is not None for group in by_prompt.values() for sample in group)
    collected: dict[str, list[float]] = defaultdict(list)
    for group in by_prompt.values():
        for name, value in _prompt_statistics(group, samples_per_prompt, with_vote):
            collected[name].append(value)
    return {name: fmean(values) for name, values in collected.items()}


def draw_sizes(samples_per_prompt: int) -> list[int]:
    """The n of ``best@n``, ``worst@n`` and ``maj@n``: 2, 4, 8, ... below N, then N itself; none for N = 1."""
    sizes = {1 << exponent for exponent in range(samples_per_prompt.bit_length())} | {samples_per_prompt}
    return sorted(sizes - {1})


def best_of(values: Sequence[float], draws: int) -> MeanAndStd:
    """Moments of the largest of n = ``draws`` values drawn with replacement from the N ``values``.

    In ascending order, the i-th value is at least the largest drawn with probability (i / N)^n, so it is the
    largest with probability (i / N)^n - ((i - 1) / N)^n: what a bootstrap tends to as its repetitions grow.
    """
    return _last_drawn(sorted(values), draws)


def worst_of(values: Sequence[float], draws: int) -> MeanAndStd:
    """Moments of the smallest of ``draws`` values drawn with replacement from ``values``; see ``best_of``."""
    return _last_drawn(sorted(values, reverse=True), draws)


def majority_of(values: Sequence[float], answers: Sequence[str | None], draws: int) -> MeanAndStd:
    """Moments of the value of the most frequent answer among ``draws`` samples drawn with replacement.

    Tied answers win with equal probability, and each drawn sample of the winning answer stands for it with
    equal probability. The rule "the first drawn of the tied answers wins, with its first value" has the same
    distribution, because all orders of the same draws are equally likely.
    """
    counts = Counter(answers)
    chances = winning_probabilities(tuple(sorted(counts.values())), draws)
    return _moments(values, [chances[counts[answer]] / counts[answer] for answer in answers])


@lru_cache(maxsize=4096)
def winning_probabilities(counts: tuple[int, ...], draws: int) -> Mapping[int, float]:
    """Probability that an answer wins a vote of ``draws`` samples drawn with replacement, by how many samples
    give it.

    ``counts``: samples of each answer, ascending. Ties are shared equally, so answers with equal counts win
    equally often. Enumerated up to ``LARGEST_ENUMERATED_VOTE`` samples; above, an estimate from
    ``SIMULATED_VOTES`` seeded votes.
    """
    if sum(counts) > LARGEST_ENUMERATED_VOTE:
        return _estimated_winning_probabilities(counts, draws)
    return {count: _winning_probability(counts, counts.index(count), draws) for count in set(counts)}


def _prompt_statistics(
    group: Sequence[ValidationSample], samples_per_prompt: int, with_vote: bool
) -> Iterator[tuple[str, float]]:
    values = [sample.value for sample in group]
    answers = [sample.answer for sample in group]
    yield f"mean@{samples_per_prompt}", fmean(values)
    if samples_per_prompt == 1:
        return
    yield f"std@{samples_per_prompt}", unbiased_std(values)
    for draws in draw_sizes(samples_per_prompt):
        statistics = {"best": best_of(values, draws), "worst": worst_of(values, draws)}
        if with_vote:
            statistics["maj"] = majority_of(values, answers, draws)
        for name, moments in statistics.items():
            yield f"{name}@{draws}/mean", moments.mean
            yield f"{name}@{draws}/std", moments.std


def unbiased_std(values: Sequence[float]) -> float:
    """Standard deviation with Bessel's correction; 0 for a single value."""
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def _last_drawn(ordered: Sequence[float], draws: int) -> MeanAndStd:
    """Moments of the last value in ``ordered`` that is drawn."""
    cumulative = [(rank / len(ordered)) ** draws for rank in range(len(ordered) + 1)]
    return _moments(ordered, [cumulative[rank + 1] - cumulative[rank] for rank in range(len(ordered))])


def _moments(values: Sequence[float], probabilities: Sequence[float]) -> MeanAndStd:
    pairs = list(zip(values, probabilities, strict=True))
    mean = math.fsum(value * probability for value, probability in pairs)
    return MeanAndStd(
        mean, math.sqrt(math.fsum((value - mean) ** 2 * probability for value, probability in pairs))
    )


def _winning_probability(counts: tuple[int, ...], candidate: int, draws: int) -> float:
    """Sum over the number of votes, ``top``, with which the candidate may win."""
    share = counts[candidate] / sum(counts)
    other_shares = [count / sum(counts) for count in counts[:candidate] + counts[candidate + 1 :]]
    return math.fsum(
        math.comb(draws, top) * share**top * _tied_win_probability(other_shares, top, draws - top)
        for top in range(1, draws + 1)
        if len(other_shares) * top >= draws - top
    )


def _tied_win_probability(other_shares: Sequence[float], top: int, draws: int) -> float:
    """Probability that ``draws`` votes all fall on the other answers and none of these gets more than
    ``top``, with a weight of 1 / (1 + t) when t of them get ``top``.

    ``state[m, t]`` is the probability of m such votes on the answers seen so far, t of them with ``top``. One
    more answer of share p takes m votes to m + j with probability C(m + j, j) p^j: its j votes lie anywhere
    among the m earlier ones.
    """
    most_ties = draws // top
    state = np.zeros((draws + 1, most_ties + 1))
    state[0, 0] = 1.0
    for share in other_shares:
        transition = _vote_transition(share, draws)
        following: NDArray[np.float64] = np.triu(transition, 1 - top) @ state
        if most_ties > 0:
            following[top:, 1:] += np.diagonal(transition, -top)[:, None] * state[:-top, :-1]
        state = following
    return float(state[draws] @ (1.0 / np.arange(1, most_ties + 2)))


@lru_cache(maxsize=512)
def _vote_transition(share: float, draws: int) -> NDArray[np.float64]:
    """float64 ``[draws + 1, draws + 1]``, lower triangular: C(to, from) share^(to - from) at ``[to,
    from]``."""
    votes = range(draws + 1)
    return np.array([[math.comb(to, start) * share ** max(to - start, 0) for start in votes] for to in votes])


def _estimated_winning_probabilities(counts: tuple[int, ...], draws: int) -> Mapping[int, float]:
    shares = np.array(counts) / sum(counts)
    votes = np.random.default_rng(VOTE_SEED).multinomial(draws, shares, size=SIMULATED_VOTES)
    leads = votes == votes.max(axis=1, keepdims=True)
    chances = (leads / leads.sum(axis=1, keepdims=True)).mean(axis=0)
    return {count: float(chances[np.array(counts) == count].mean()) for count in set(counts)}
