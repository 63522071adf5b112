"""Tools, interactions and a loop by verl's conventions, for tests: with its methods, and no base class."""

import uuid
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from verl_rc.runtime.rollout.environment import Environment, Reply, Turn

PROPERTY = {"type": "string", "description": "The answer."}


def schema(name: str, argument: str = "answer") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: PROPERTY}, "required": [argument]}
    return {
        "type": "function",
        "function": {"name": name, "description": "Judges.", "parameters": parameters},
    }


class Judge:
    """As the GSM8K tool of verl's examples: it says whether an answer is the truth of the row, and a wrong
    one costs 0.05."""

    made = 0

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        Judge.made += 1
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.truths: dict[str, str] = {}
        self.released: list[str] = []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        instance_id = instance_id or uuid.uuid4().hex
        self.truths[instance_id] = kwargs["create_kwargs"].get("ground_truth", "nothing")
        return instance_id, SimpleNamespace(text=None)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        if parameters["answer"] == "boom":
            raise RuntimeError("the sandbox was lost")
        if parameters["answer"] == "picture":
            return SimpleNamespace(text=None, image=["pixels"]), 0.0, {}
        data = kwargs["agent_data"]
        data.extra_fields["asked"] = data.extra_fields.get("asked", 0) + 1
        right = parameters["answer"] == self.truths[instance_id]
        text = f"{right} {data.extra_fields['asked']} {len(data.messages)}"
        return SimpleNamespace(text=text), 0.0 if right else -0.05, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.truths[instance_id]
        self.released.append(instance_id)


class OldSearch:
    """As tools of early releases: ``create`` returns a name alone, ``execute`` a text, no reward."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.tool_schema = tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return "one"

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return f"found {parameters['query']}", None, None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        pass


class Unfinished:
    """It lacks ``release``."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.tool_schema = tool_schema

    async def create(self, **kwargs: Any) -> None:
        pass

    async def execute(self, **kwargs: Any) -> None:
        pass


class TruthInteraction:
    """As the GSM8K interaction of verl's examples: score 1 and the end for the truth of the row, else 0 and
    another try."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.truths: dict[str, str] = {}
        self.finalized = 0

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        assert instance_id is not None
        assert ground_truth is not None
        self.truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        assert messages[-1]["role"] == "assistant"
        right = messages[-1]["content"] == self.truths[instance_id]
        return right, "right" if right else f"wrong, {len(messages)}", float(right), {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self.truths[instance_id]
        self.finalized += 1


class Echo(Environment):
    """An environment that an agent loop file may name."""

    def __init__(self, word: str) -> None:
        self.word = word

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        pass

    async def step(self, turn: Turn) -> Reply:
        return Reply(reward=float(turn.text == self.word), done=True)


class AgentLoopBase:
    """As verl's, which has ``run``."""


class OwnLoop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> None:
        raise NotImplementedError
