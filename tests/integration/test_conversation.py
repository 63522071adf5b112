"""Conversations with tools on a real engine: the trainer gets the tokens that were sampled, and agrees on
their log-probs."""

from dataclasses import replace
from itertools import groupby

import torch
from conversing import episode
from ragged_rows import whole
from real_steps import RealRun

from verl_rc.algorithm.ppo.choices import log_prob_limit
from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.records.batches import real_rows
from verl_rc.records.rollout_batch import build_rollout_batch
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions, request_seed
from verl_rc.trainer.cluster.remote import wait_for_all
from verl_rc.trainer.step_record import StepRecord

VERSION = 1000


def converse(run: RealRun, config: MultiTurnConfig | None) -> None:
    """``FaultyEngine.converse`` of every engine."""
    wait_for_all([engine.call("converse", config) for engine in run.services.engines._engines])


def test_sampled_tokens_reach_the_trainer_unchanged_and_with_the_log_probs_it_computes(
    faulty_run: RealRun,
) -> None:
    run = faulty_run.services
    faulty_run.publisher.publish(VERSION, StepRecord())
    stops = (
        run.tokenizer.eos_token_id,
        *range(0, 258, 2),
    )  # half of the vocabulary: turns of two tokens on average
    rollout = run.config.actor_rollout_ref.rollout
    options = replace(
        SamplingOptions.for_training(rollout, run.config.data.max_response_length, run.stop_token_ids),
        stop_token_ids=stops,
    )
    requests = [
        GenerationRequest(
            row.prompt_token_ids,
            request_seed({"row": row.row_index}),
            episode=episode(row.row_index),
        )
        for row in run.validation_rows
    ]
    converse(
        faulty_run, MultiTurnConfig(enable=True, tools=["calculator"], format="tag", max_assistant_turns=3)
    )
    try:
        samples = run.engines.generate(requests, options)
    finally:
        converse(faulty_run, None)
    prompts = [request.prompt_token_ids for request in requests]
    rows = build_rollout_batch(prompts, range(len(prompts)), samples, with_tools=True)
    rollouts = whole(rows)

    mask, lengths = rollouts.response_mask, rollouts.tokens.response_lengths
    turns = [
        [key for key, _ in groupby(row[:length])]
        for row, length in zip(mask.tolist(), lengths.tolist(), strict=True)
    ]
    assert rollouts.num_turns.tolist() == [1 + len(row) for row in turns]
    assert max(len(row) for row in turns) == 5  # three turns of the policy, two answers
    for row, values in enumerate(real_rows(rollouts.tokens.responses, lengths)):
        tokens = values.tolist()
        ends = [i for i in range(len(tokens) - 1) if mask[row, i] and not mask[row, i + 1]]
        assert all(tokens[i] in stops for i in ends)
    # The trainer computes them over prompt and response as they are: other tokens in any turn's prompt would
    # show.
    scores = run.actor.compute_log_probs(
        rows.tokens, log_prob_limit(run.config.actor_rollout_ref.rollout)
    ).result
    is_sampled = rows.response_mask
    ours, theirs = scores.log_probs[is_sampled], rows.rollout_log_probs[is_sampled]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert rollouts.policy_versions[mask].unique().tolist() == [VERSION]
    assert rollouts.rollout_log_probs[~mask].unique().tolist() == [0.0]
