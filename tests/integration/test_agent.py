"""Agents on a real engine: the tokens are those that were sampled, with the log-probs that the model computes
over the whole episode."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from conversing import episode
from small_engines import publish, sender_of
from small_models import log_probs
from transformers import AutoModelForCausalLM

from verl_rc.config.rollout import EnvironmentConfig, RolloutConfig
from verl_rc.records.episode import Opening
from verl_rc.records.parts import Answer, Part, token_ids
from verl_rc.records.tokenize import encode_prompt, load_tokenizer
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.sampling import ConversationOptions, GenerationRequest, SamplingOptions

EPISODES, TURNS = 24, 3
ASKED = [{"role": "user", "content": "guess None"}]


def test_tokens_are_those_that_were_sampled_whatever_the_agent_says(
    small_engine: ChildProcess, task: dict[str, Path]
) -> None:
    played = {"turns": TURNS, "faults": {"edited": 1, "n": 2}}
    arguments = {"function": "agents_of_a_user:play", "arguments": played}
    environment = EnvironmentConfig(
        name="verl_rc.runtime.rollout.environments.agent:Agent", arguments=arguments, step_seconds=60
    )
    options = ConversationOptions(RolloutConfig(environment=environment), str(task["model"]), False, {})
    tokenizer = load_tokenizer(str(task["model"]), False)
    stops = (tokenizer.eos_token_id, *range(0, 258, 2))  # turns of two tokens on average
    prompt = encode_prompt(tokenizer, ASKED)
    opening = Opening(ASKED, [])
    requests = [
        GenerationRequest(prompt, 100 + number, episode=episode(number, opening))
        for number in range(EPISODES)
    ]
    model: Any = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    publish(sender_of(model), small_engine, 1)
    small_engine.call("converse", options)
    try:
        samples = small_engine.call("generate", requests, SamplingOptions(1.0, 1.0, -1, 200, stops))
    finally:
        small_engine.call("converse", None)
    added = tokenizer("h=", add_special_tokens=False)["input_ids"]
    unlike_text = 0
    for sample in samples:
        turns = [token_ids([part]) for part in sample.parts if isinstance(part, Part)]
        # The conversation with the edited history has a turn of its own, and then the agent's goes on.
        assert (sample.finished, len(turns), sample.replies[-1].reward) == (True, TURNS + 1, TURNS)
        reported = [reply.metrics for reply in sample.replies]
        assert sum(one.get("branches", 0.0) for one in reported) == 2.0
        assert reported[-1]["refused"] == 1.0
        # What lies between two turns of a conversation is what the agent has added, and nothing else.
        between = [part for part in sample.parts if isinstance(part, Answer)]
        assert [part.restarts for part in between] == [True, True, False]
        assert all(token_ids([part])[-len(added) :] == added for part in between)
        unlike_text += sum(tokenizer(tokenizer.decode(ids))["input_ids"] != ids for ids in turns)
        begins = [place for place, part in enumerate(sample.parts) if getattr(part, "restarts", False)]
        for begin, end in pairwise([0, *begins, len(sample.parts)]):
            parts = sample.parts[begin:end]
            first, parts = (token_ids(parts[:1]), parts[1:]) if begin else (prompt, parts)
            computed = log_probs(model, first, token_ids(parts))
            sampled = torch.cat([torch.full(part.token_ids.shape, isinstance(part, Part)) for part in parts])
            recorded = torch.cat([part.log_probs for part in parts if isinstance(part, Part)])
            torch.testing.assert_close(recorded, computed[sampled], rtol=0, atol=1e-4)
    assert unlike_text > EPISODES  # made again from text, they would be other tokens
