"""Heads that a real engine reports, and the trainer's log-probs of the same tokens."""

from dataclasses import replace
from pathlib import Path

import torch
from ragged_rows import whole
from small_engines import publish, sender_of

from verl_rc.records.heads import heads
from verl_rc.records.rollout_batch import build_rollout_batch
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.language_model import load_causal_lm

PROMPTS = [[3 + (7 * row + 5 * place) % 250 for place in range(12)] for row in range(8)]
TEMPERATURE = 0.03  # of an untrained model, whose tokens are nearly equally likely


def test_the_trainer_computes_what_the_engine_reports_with_and_without_a_filter(
    small_engine: ChildProcess, task: dict[str, Path]
) -> None:
    """To the rounding of float32; a filter's set is recorded beside the head, and both sides renormalise."""
    publish(sender_of(load_causal_lm(str(task["model"]), torch.float32)), small_engine, 1)
    model = load_causal_lm(str(task["model"]), torch.float32).eval()
    requests = [GenerationRequest(prompt_token_ids=prompt, seed=row) for row, prompt in enumerate(PROMPTS)]
    for filtered in (False, True):
        options = SamplingOptions(
            TEMPERATURE,
            1.0,
            5 if filtered else -1,
            24,
            (),
            True,
            max_support=21 * filtered,
            head_tokens=7,
        )
        samples = small_engine.call("generate", requests, options)
        rollouts = whole(build_rollout_batch(PROMPTS, range(len(PROMPTS)), samples))
        tokens, mask = rollouts.tokens, rollouts.response_mask
        assert (tokens.support_counts is not None) == filtered
        assert tokens.head_counts is not None
        assert tokens.head_ids is not None
        ids, log_probs = heads(tokens.head_counts, tokens.head_ids)
        assert ids.shape[-1] == (5 if filtered else 7)
        with torch.no_grad():
            scores = score_tokens(
                model, tokens, ForwardOptions(TEMPERATURE), with_entropy=False, candidate_ids=ids
            )
        assert scores.candidate_log_probs is not None
        assert (scores.candidate_log_probs - log_probs)[mask].abs().max() < 1e-4
        masses = log_probs.exp().sum(-1)[mask]
        assert masses.max() < 1 + 1e-5
        assert masses.min() > (1 - 1e-5 if filtered else 0.1)
        is_sampled = ids == tokens.responses[..., None]
        found = log_probs.where(is_sampled, 0).sum(-1)[is_sampled.any(-1)]
        assert torch.equal(found, rollouts.rollout_log_probs[is_sampled.any(-1)])


def test_what_continues_after_a_publication_has_heads_of_both_versions(
    small_engine: ChildProcess, task: dict[str, Path]
) -> None:
    """Each token's head is that of the weights that sampled it."""
    models = [load_causal_lm(str(task["model"]), torch.float32).eval() for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.2)
    options = SamplingOptions(TEMPERATURE, 1.0, -1, 5, (), True, head_tokens=7)
    publish(sender_of(models[0]), small_engine, 1)
    requests = [GenerationRequest(prompt_token_ids=prompt, seed=row) for row, prompt in enumerate(PROMPTS)]
    cut = [replace(one, finished=False) for one in small_engine.call("generate", requests, options)]
    publish(sender_of(models[1]), small_engine, 2)
    requests = [replace(request, so_far=one) for request, one in zip(requests, cut, strict=True)]
    samples = small_engine.call("generate", requests, replace(options, max_tokens=12))
    rollouts = whole(build_rollout_batch(PROMPTS, range(len(PROMPTS)), samples))
    tokens, versions = rollouts.tokens, rollouts.policy_versions
    assert versions.tolist() == [[1] * 5 + [2] * 7] * len(PROMPTS)
    assert tokens.head_counts is not None
    assert tokens.head_ids is not None
    ids, log_probs = heads(tokens.head_counts, tokens.head_ids)
    for version, model in enumerate(models, start=1):
        with torch.no_grad():
            scores = score_tokens(
                model, tokens, ForwardOptions(TEMPERATURE), with_entropy=False, candidate_ids=ids
            )
        assert scores.candidate_log_probs is not None
        gap = (scores.candidate_log_probs - log_probs).abs().amax(-1)
        assert gap[versions == version].max() < 1e-4
        assert gap[versions != version].max() > 1e-2
