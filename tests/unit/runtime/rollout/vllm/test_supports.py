"""The supports that a filter left, from what vLLM reports with ``processed_logprobs``."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from verl_rc.runtime.rollout.vllm.supports import supports
from verl_rc.runtime.rollout.vllm.top_tokens import ReportedTokens

NEVER = -math.inf
Place = tuple[tuple[int, float], Sequence[tuple[int, float]]]


def flat(places: Sequence[Place]) -> Any:
    """The sampled token and the likely ones of each place, in a row; values are probabilities."""
    entries = [entry for sampled, likely in places for entry in (sampled, *likely)]
    log_probs = [math.log(p) if p > 0 else (NEVER if p == 0 else math.nan) for _, p in entries]
    return SimpleNamespace(token_ids=[word for word, _ in entries], logprobs=log_probs)


def sets(places: Sequence[Place], vocabulary: int = 100) -> list[list[int]]:
    words = [word for (word, _), _ in places]
    column = supports(words, ReportedTokens.from_output(words, flat(places), 4, 3), 4, 3, vocabulary)
    return [column[place : place + 1].values.tolist() for place in range(len(places))]


def test_words_with_a_finite_log_prob_are_the_set() -> None:
    assert sets(
        [
            ((7, 0.25), [(9, 0.75), (7, 0.25), (1, 0.0)]),
            ((5, 1.0), [(5, 1.0), (2, 0.0), (3, 0.0)]),
        ]
    ) == [[9, 7], [5]]


def test_a_set_that_may_be_larger_than_what_was_asked_for_is_not_recorded() -> None:
    """Three of three have a probability, so there may be more; of three words there are none."""
    place = ((8, 0.2), [(7, 0.4), (6, 0.3), (5, 0.1)])
    assert sets([place, ((5, 1.0), [(5, 1.0), (2, 0.0), (3, 0.0)])]) == [[], [5]]
    assert sets([((2, 0.2), [(0, 0.5), (1, 0.3), (2, 0.2)])], vocabulary=3) == [[0, 1, 2]]


def test_what_is_not_a_number_is_left_to_rollout_correction() -> None:
    assert sets([((7, -1.0), [(9, -1.0), (7, -1.0), (1, -1.0)])]) == [[]]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            ((4, 0.25), [(9, 0.75), (7, 0.25), (1, 0.0)]),
            "token 4 at position 0 of request 4 is not in its set",
        ),
        (((7, 0.2), [(9, 0.75), (7, 0.2), (1, 0.0)]), "is in its set, whose sum is 0.9500"),
    ],
)
def test_a_token_outside_its_set_and_raw_log_probs_are_refused(place: Place, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        sets([place])


def test_an_engine_that_reports_no_likely_words_is_refused() -> None:
    alone = SimpleNamespace(token_ids=[7], logprobs=[-0.5])
    with pytest.raises(RuntimeError, match="must come with 3 likely ones"):
        ReportedTokens.from_output([7], alone, 4, 3)
