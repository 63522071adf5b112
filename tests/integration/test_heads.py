"""Heads that a real engine reports, and the trainer's log-probs of the same tokens."""

from pathlib import Path

import torch
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
        rollouts = build_rollout_batch(PROMPTS, range(len(PROMPTS)), samples, 0)
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
