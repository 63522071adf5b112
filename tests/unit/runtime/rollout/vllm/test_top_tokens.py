"""Heads of a sampler's distributions, from what vLLM reports beside each sampled token."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from verl_rc.runtime.rollout.vllm.top_tokens import ReportedTokens

REPORTED = SimpleNamespace(
    token_ids=[7, 9, 7, 1, 5, 5, 2, 3],
    logprobs=[math.log(p) if p else -math.inf for p in (0.25, 0.5, 0.25, 0.125, 1.0, 1.0, 0.0, 0.0)],
)
"""Two tokens, each followed by the three most likely ones."""


def test_a_head_has_the_most_likely_tokens_that_can_be_drawn() -> None:
    top = ReportedTokens.from_output([7, 5], REPORTED, 4, 3)
    column = top.heads(2, number=4)
    assert column.counts.tolist() == [4, 2]
    assert column.values[:2].tolist() == [9, 7]
    assert column.values[2:4].view(np.float32).tolist() == pytest.approx([math.log(0.5), math.log(0.25)])
    assert column.values[4:].tolist() == [5, 0]  # the bits of a log-prob of 0 are 0


def test_probabilities_that_sum_to_more_than_1_are_refused() -> None:
    raw = SimpleNamespace(token_ids=[7, 7, 9], logprobs=[math.log(0.8), math.log(0.8), math.log(0.3)])
    top = ReportedTokens.from_output([7], raw, 4, 2)
    with pytest.raises(RuntimeError, match=r"at position 0 of request 4 sum to 1\.1000"):
        top.heads(2, number=4)
    assert top.heads(1, number=4).counts.tolist() == [2]
