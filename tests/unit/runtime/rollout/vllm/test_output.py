"""vLLM's output as parts: tokens, log-probs and versions, and that versions are proven."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_samples import of_parts

from verl_rc.runtime.rollout.vllm.output import expert_lists, parts_of_output


class Flat(SimpleNamespace):
    """vLLM's ``FlatLogprobs`` of sampled tokens alone."""

    def __len__(self) -> int:
        return len(self.start_indices)


def output(tokens: Sequence[int], *spans: tuple[str, int, int]) -> Any:
    """The log-prob of a token is minus an eighth of its id."""
    log_probs = Flat(
        start_indices=range(len(tokens)), token_ids=list(tokens), logprobs=[token / -8 for token in tokens]
    )
    versions = [SimpleNamespace(version=version, start=start, end=end) for version, start, end in spans]
    return SimpleNamespace(token_ids=list(tokens), logprobs=log_probs, weight_versions=versions)


def test_a_request_is_one_part_or_none() -> None:
    (part,) = parts_of_output(output([2, 0], ("6", 0, 2)), (6, 6), 0)
    assert of_parts([part]) == [(2, -0.25, 6), (0, 0.0, 6)]
    assert parts_of_output(output([]), (5, 5), 0) == []


def test_a_request_that_went_on_behind_its_cache_has_several_versions() -> None:
    found = parts_of_output(output([4, 6, 8], ("4", 0, 1), ("6", 1, 3)), (4, 6), 0)
    assert [of_parts([part]) for part in found] == [[(4, -0.5, 4)], [(6, -0.75, 6), (8, -1.0, 6)]]


def test_an_engine_without_an_update_knows_no_version() -> None:
    assert of_parts(parts_of_output(output([4], ("default", 0, 1)), (-1, -1), 0)) == [(4, -0.5, -1)]


@pytest.mark.parametrize(
    ("spans", "held"),
    [
        ([("3", 0, 2)], (4, 4)),  # older than what the engine holds
        ([("5", 0, 2)], (4, 4)),  # the label of a later moment
        ([("4", 0, 1), ("5", 1, 2)], (4, 4)),
        ([("4", 0, 1), ("5", 1, 2)], (5, 5)),  # an update under a running request that should have been cut
        ([("5", 0, 1), ("4", 1, 2)], (4, 5)),
        ([("4", 0, 2)], (4, 5)),
        ([("default", 0, 2)], (4, 4)),
        ([], (4, 4)),
        ([("4", 0, 1)], (4, 4)),  # a token without a version
        ([("4", 0, 1), ("5", 2, 2)], (4, 5)),
    ],
)
def test_tokens_of_weights_that_the_engine_does_not_hold_are_refused(
    spans: list[Any], held: tuple[int, int]
) -> None:
    with pytest.raises(RuntimeError, match=r"the tokens of request 17 must come from versions"):
        parts_of_output(output([5, 6], *spans), held, 17)


def test_every_token_needs_its_own_log_prob() -> None:
    wrong = output([5, 6], ("4", 0, 2))
    wrong.logprobs.token_ids = [5, 7]
    with pytest.raises(ValueError, match="the log-probs of request 3 must belong to its sampled tokens"):
        parts_of_output(wrong, (4, 4), 3)
    wrong.logprobs = None
    with pytest.raises(
        ValueError, match="every one of the 2 tokens of request 3 needs a log-prob, the engine returned none"
    ):
        parts_of_output(wrong, (4, 4), 3)


def test_experts_come_beside_the_token_that_was_sampled_behind_them() -> None:
    """Three places of the context, then two tokens of which the second was never read; two layers."""
    routes = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    column = expert_lists(routes, 3, 2, 5)
    assert column.counts.tolist() == [12, 4]
    assert column[:1].values.tolist() == list(range(12))
    assert column[1:].values.tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize(
    ("routes", "found"),
    [
        (None, "nothing"),
        (np.zeros((3, 2, 2), dtype=np.uint8), r"uint8 of shape \[3, 2, 2\]"),
        (np.zeros((4, 2, 2), dtype=np.uint16), r"uint16 of shape \[4, 2, 2\]"),
    ],
)
def test_experts_that_are_not_of_every_place_end_a_request(routes: Any, found: str) -> None:
    with pytest.raises(RuntimeError, match=rf"at 4 positions of request 5 .* the engine returned {found}"):
        expert_lists(routes, 3, 2, 5)
