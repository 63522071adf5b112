"""A response made of several requests: its tokens, log-probs and versions, and that versions are proven."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_rc.data.parts import Part
from verl_rc.rollout.response import UNKNOWN, Ended, Response
from verl_rc.rollout.sampling import GenerationRequest


class Flat(SimpleNamespace):
    """vLLM's ``FlatLogprobs`` of sampled tokens alone."""

    def __len__(self) -> int:
        return len(self.start_indices)


def output(tokens: Sequence[int], *spans: tuple[str, int, int], reason: str = "abort") -> Any:
    """The log-prob of a token is minus a tenth of its id."""
    log_probs = Flat(
        start_indices=range(len(tokens)), token_ids=list(tokens), logprobs=[token / -10 for token in tokens]
    )
    versions = [SimpleNamespace(version=version, start=start, end=end) for version, start, end in spans]
    return SimpleNamespace(
        token_ids=list(tokens), logprobs=log_probs, weight_versions=versions, finish_reason=reason
    )


def test_requests_make_one_response() -> None:
    part = Part(torch.tensor([7, 8], dtype=torch.int32), torch.tensor([-0.5, -0.25]), 3)
    begun = Response.from_parts(GenerationRequest([1], seed=5, parts=[part]))
    cut = begun.with_output(output([9], ("4", 0, 1)), (4, 4), 0)
    nothing_yet = cut.with_output(output([]), (5, 5), 0)
    whole = Ended(nothing_yet, output([2, 0], ("6", 0, 2), reason="stop"), (6, 6)).whole(0)
    assert whole.token_ids == [7, 8, 9, 2, 0]
    assert whole.versions == [3, 3, 4, 6, 6]
    assert whole.log_probs == [-0.5, -0.25, -0.9, -0.2, 0.0]
    assert (begun.stopped, cut.stopped, whole.stopped) == (False, False, True)
    assert begun.token_ids == [7, 8]  # what was reported of an earlier update does not grow
    assert not Ended(cut, output([2], ("4", 0, 1), reason="length"), (4, 4)).whole(0).stopped


def test_a_request_that_went_on_behind_its_cache_has_several_versions() -> None:
    found = Response().with_output(output([5, 6, 7], ("4", 0, 1), ("6", 1, 3)), (4, 6), 0)
    assert found.versions == [4, 6, 6]


def test_an_engine_without_an_update_knows_no_version() -> None:
    assert Response().with_output(output([5], ("default", 0, 1)), (UNKNOWN, UNKNOWN), 0).versions == [-1]


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
    ],
)
def test_tokens_of_weights_that_the_engine_does_not_hold_are_refused(
    spans: list[Any], held: tuple[int, int]
) -> None:
    with pytest.raises(RuntimeError, match=r"the tokens of request 17 must come from versions"):
        Response().with_output(output([5, 6], *spans), held, 17)


def test_every_token_needs_its_own_log_prob() -> None:
    wrong = output([5, 6], ("4", 0, 2))
    wrong.logprobs.token_ids = [5, 7]
    with pytest.raises(ValueError, match="the log-probs of request 3 must belong to its sampled tokens"):
        Response().with_output(wrong, (4, 4), 3)
    wrong.logprobs = None
    with pytest.raises(
        ValueError, match="every one of the 2 tokens of request 3 needs a log-prob, the engine returned none"
    ):
        Response().with_output(wrong, (4, 4), 3)
