"""verl's tools and interactions on a real engine: calls that the engine sampled are answered, and what is
trained on are the tokens it sampled."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from saying_models import write_saying_model
from small_engines import start_small_engine
from small_models import log_probs
from tools_of_verl import schema
from transformers import AutoModelForCausalLM

from verl_rc.config.rollout import EnvironmentConfig, RolloutConfig
from verl_rc.config.verl.environments import ADAPTER
from verl_rc.records.episode import Episode, Opening
from verl_rc.records.parts import Answer, Part, token_ids
from verl_rc.records.tokenize import encode_prompt
from verl_rc.runtime.rollout.sampling import ConversationOptions, GenerationRequest, SamplingOptions

EPISODES, TURNS = 24, 5
PROMPT = [{"role": "user", "content": "2 + 2"}]
CALLS = {
    f"<tool_call>{json.dumps({'name': 'judge', 'arguments': {'answer': answer}})}</tool_call>": answer
    for answer in ("4", "5")
}
ROW = {
    "prompt": PROMPT,
    "extra_info": {
        "tools_kwargs": {"judge": {"create_kwargs": {"ground_truth": "4"}}},
        "interaction_kwargs": {"name": "truth", "ground_truth": "4"},
    },
}


def written(folder: Path, **contents: Any) -> dict[str, str]:
    for name, content in contents.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return {f"{name}_path": str(folder / f"{name}.yaml") for name in contents}


def rewards(texts: list[str]) -> tuple[list[float], list[float]]:
    """Rewards of tools and scores of the interaction that turns get; the last turn of five gets none."""
    answered = texts[: TURNS - 1]
    tools = [0.0 if CALLS[text] == "4" else -0.05 for text in answered if text in CALLS]
    return tools, [float(text == "4") for text in answered if text not in CALLS]


def test_calls_and_answers_of_a_real_engine(tmp_path: Path) -> None:
    tokenizer = write_saying_model(tmp_path / "model", [*CALLS, "4", "5"])
    tool = {"class_name": "tools_of_verl.Judge", "config": {}, "tool_schema": schema("judge")}
    interaction = {"class_name": "tools_of_verl.TruthInteraction", "config": {}}
    files = written(
        tmp_path, tool_config={"tools": [tool]}, interaction_config={"interaction": [interaction]}
    )
    environment = EnvironmentConfig(
        name=ADAPTER, arguments={**files, "max_assistant_turns": TURNS}, reward="function"
    )
    options = ConversationOptions(RolloutConfig(environment=environment), str(tmp_path / "model"), False, {})
    prompt, opening = encode_prompt(tokenizer, PROMPT), Opening(PROMPT, [schema("judge")])
    requests = [
        GenerationRequest(prompt, 100 + number, episode=Episode((number, 0, 0), ROW, number, opening))
        for number in range(EPISODES)
    ]
    engine = start_small_engine(tmp_path / "model", {}, conversation=options)
    try:
        samples = engine.call(
            "generate", requests, SamplingOptions(1.0, 1.0, -1, 80, (tokenizer.eos_token_id,))
        )
    finally:
        engine.end()
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    seen = set()
    for sample in samples:
        turns = [token_ids([part]) for part in sample.parts if isinstance(part, Part)]
        texts = [tokenizer.decode(turn[0]) for turn in turns]
        tools, scores = rewards(texts)
        told = sample.replies[-1].extra_info
        assert (told["tool_rewards"], told["turn_scores"]) == (tools, scores)
        assert sample.tool_calls == len(tools)
        assert (texts[-1] == "4") == sample.finished or len(texts) == TURNS
        between = [part for part in sample.parts if isinstance(part, Answer)]
        said = [message["content"] for reply in sample.replies for message in reply.messages]
        assert [tokenizer.decode(part.token_ids) for part in between] == [f"{text}=" for text in said]
        seen |= set(texts)
        computed = log_probs(model, prompt, token_ids(sample.parts))
        sampled = torch.cat(
            [torch.full(part.token_ids.shape, isinstance(part, Part)) for part in sample.parts]
        )
        recorded = torch.cat([part.log_probs for part in sample.parts if isinstance(part, Part)])
        torch.testing.assert_close(recorded, computed[sampled], rtol=0, atol=1e-4)
    assert seen == {*CALLS, "4", "5"}
