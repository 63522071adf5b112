"""Conversations with tools on a real engine: the trainer gets the tokens that were sampled, and agrees on their log-probs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from real_steps import RealRun

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.data.batches import Completions, Timed
from verl_rc.driver import weights
from verl_rc.driver.sample import as_rollouts
from verl_rc.driver.services import Services
from verl_rc.driver.step_record import StepRecord
from verl_rc.ppo.choices import log_prob_limit
from verl_rc.rollout.agent_loop import AgentLoop
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions, request_seed
from verl_rc.rollout.tool_calls import ToolCall

VERSION = 1000


class RecordingEngines:
    """The run's engines; what goes in and out is kept."""

    def __init__(self, run: Services) -> None:
        self._engines = run.engines
        self.turns: list[tuple[list[GenerationRequest], Completions]] = []

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> Timed[Completions]:
        answer = self._engines.generate(requests, options)
        self.turns.append((list(requests), answer.result))
        return answer


def every_turn_calls(text: str) -> list[Any]:
    """An untrained model writes no call, so what it writes is taken for one."""
    return [ToolCall("calculator", {"expression": f"{len(text)}+1"})]


def test_sampled_tokens_reach_the_trainer_unchanged_and_with_the_log_probs_it_computes(faulty_run: RealRun) -> None:
    run, engines = faulty_run.services, RecordingEngines(faulty_run.services)
    weights.publish(run, faulty_run.state, VERSION, StepRecord())
    config = MultiTurnConfig(enable=True, tools=["calculator"], format="tag", max_assistant_turns=3)
    loop = AgentLoop(run.tokenizer, config, {})
    loop._parse = every_turn_calls
    stops = (run.tokenizer.eos_token_id, *range(0, 258, 2))  # half of the vocabulary: turns of two tokens on average
    rollout = run.config.actor_rollout_ref.rollout
    options = replace(SamplingOptions.for_training(rollout, run.stop_token_ids), stop_token_ids=stops)
    requests = [GenerationRequest(row.prompt_token_ids, request_seed({"row": row.row_index})) for row in run.validation_rows]
    completions = loop.generate(requests, options, engines.generate).result
    rollouts = as_rollouts(run, requests, completions)

    _every_turn_continues_the_tokens_before_it(engines.turns, requests, completions)
    mask, lengths = rollouts.response_mask, rollouts.tokens.response_lengths
    assert int(rollouts.tool_calls.sum()) > len(requests)
    assert bool((mask.sum(dim=-1) < lengths).any())  # some rows have tool tokens
    scores = run.actor.compute_log_probs(rollouts.tokens, log_prob_limit(run.config)).result
    torch.testing.assert_close(scores.log_probs[mask], rollouts.rollout_log_probs[mask], rtol=0, atol=1e-4)
    assert rollouts.policy_versions[mask].unique().tolist() == [VERSION]
    assert rollouts.rollout_log_probs[~mask].unique().tolist() == [0.0]


def _every_turn_continues_the_tokens_before_it(
    turns: list[tuple[list[GenerationRequest], Completions]], requests: list[GenerationRequest], completions: Completions
) -> None:
    """Replays the engines' record: each row's final tokens are those it was asked with last, and those sampled then."""
    rows = {tuple(request.prompt_token_ids): index for index, request in enumerate(requests)}
    last: dict[int, list[int]] = {}
    sampled: dict[int, list[int]] = {}
    for asked, answers in turns:
        for request, row, length in zip(asked, answers.responses.tolist(), answers.response_lengths.tolist(), strict=True):
            index = next(number for prompt, number in rows.items() if tuple(request.prompt_token_ids[: len(prompt)]) == prompt)
            before = last.get(index, request.prompt_token_ids)
            assert request.prompt_token_ids[: len(before)] == before
            last[index] = request.prompt_token_ids + row[:length]
            sampled[index] = sampled.get(index, []) + row[:length]
    for index, request in enumerate(requests):
        row = completions.responses[index, : completions.response_lengths[index]]
        assert request.prompt_token_ids + row.tolist() == last[index]
        assert row[completions.response_mask[index, : len(row)]].tolist() == sampled[index]
