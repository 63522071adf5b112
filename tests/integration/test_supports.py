"""Sets that a real engine's filters keep, and the trainer's log-probs over them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ragged_rows import whole
from small_engines import publish, sender_of

from verl_rc.records.batches import RolloutBatch
from verl_rc.records.rollout_batch import build_rollout_batch
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.language_model import load_causal_lm

PROMPTS = [[3 + (7 * row + 5 * place) % 250 for place in range(12)] for row in range(16)]
TEMPERATURE = 0.03  # of an untrained model, whose tokens are nearly equally likely
FILTERS = {
    "top_k": SamplingOptions(TEMPERATURE, 1.0, 5, 24, (), True, max_support=21),
    "top_p": SamplingOptions(TEMPERATURE, 0.9, -1, 24, (), True, max_support=300),
    "min_p": SamplingOptions(TEMPERATURE, 1.0, -1, 24, (), True, min_p=0.4, max_support=300),
    "all": SamplingOptions(TEMPERATURE, 0.95, 20, 24, (), True, min_p=0.01, max_support=36),
}
"""Limits of 300 are above the vocabulary."""


@pytest.fixture
def engine(small_engine: ChildProcess, task: dict[str, Path]) -> ChildProcess:
    """With the task's weights."""
    publish(sender_of(load_causal_lm(str(task["model"]), torch.float32)), small_engine, 1)
    return small_engine


def sampled(engine: ChildProcess, options: SamplingOptions) -> RolloutBatch:
    requests = [GenerationRequest(prompt_token_ids=prompt, seed=row) for row, prompt in enumerate(PROMPTS)]
    samples = engine.call("generate", requests, options)
    return whole(build_rollout_batch(PROMPTS, range(len(PROMPTS)), samples))


@pytest.mark.parametrize("name", FILTERS)
def test_the_trainer_computes_what_the_engine_reports(
    engine: ChildProcess, task: dict[str, Path], name: str
) -> None:
    """To the rounding of float32; over all tokens it would not."""
    options = FILTERS[name]
    rollouts = sampled(engine, options)
    tokens, mask = rollouts.tokens, rollouts.response_mask
    assert tokens.support_counts is not None
    assert tokens.support_counts[mask].min() >= 1
    if options.top_k > 0:
        assert tokens.support_counts.max() <= options.top_k  # no two tokens are as likely in float32
    model = load_causal_lm(str(task["model"]), torch.float32).eval()
    with torch.no_grad():
        over_sets = score_tokens(model, tokens, ForwardOptions(TEMPERATURE), with_entropy=True)
        plain = tokens.clone()
        plain.support_counts = plain.support_ids = None
        over_all = score_tokens(model, plain, ForwardOptions(TEMPERATURE), with_entropy=True)
    gap = (over_sets.log_probs - rollouts.rollout_log_probs)[mask].abs()
    assert gap.max() < 1e-4
    assert (over_all.log_probs - rollouts.rollout_log_probs)[mask].mean() < -1e-4
    assert over_sets.entropies is not None
    assert over_all.entropies is not None
    assert (over_sets.entropies[mask] < over_all.entropies[mask]).float().mean() > 0.5


def test_larger_sets_than_the_limit_are_not_recorded_and_greedy_tokens_have_none(
    engine: ChildProcess,
) -> None:
    few = sampled(engine, replace(FILTERS["top_p"], max_support=2)).tokens.support_counts
    assert few is not None
    all_sets = sampled(engine, FILTERS["top_p"]).tokens.support_counts
    assert all_sets is not None
    # A set of exactly the limit could be larger.
    assert torch.equal(few, torch.where(all_sets < 2, all_sets, 0))
    assert 0 < (few > 0).sum() < few.numel()
    assert sampled(engine, replace(FILTERS["top_p"], temperature=0.0)).tokens.support_counts is None
