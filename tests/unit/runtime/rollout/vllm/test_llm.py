"""What vLLM is built with in exact mode and without it."""

from types import SimpleNamespace
from typing import Any

import pytest

from verl_rc.runtime.exact import ENGINE_ARGUMENTS
from verl_rc.runtime.rollout.vllm import llm
from verl_rc.runtime.rollout.vllm.options import VllmOptions


@pytest.mark.parametrize("exact", [True, False])
def test_exact_mode_decides_about_its_own_arguments(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "LLM", lambda **arguments: arguments)
    engine = SimpleNamespace(use_trainer_operations=lambda: ENGINE_ARGUMENTS["cuda"])
    monkeypatch.setattr(llm, "device_module", lambda name: {"engine": engine}[name])
    options = VllmOptions("org/model", "float32", 8, {"enforce_eager": False, "seed": 42}, exact=exact)
    built: Any = llm.build_llm(options, logprobs_mode="processed_logprobs")
    assert built["enforce_eager"] is exact
    assert ("compilation_config" in built) is exact
    assert (built["seed"], built["logprobs_mode"]) == (42, "processed_logprobs")


def test_parts_of_an_engine_differ_in_their_place_alone() -> None:
    options = VllmOptions("org/model", "float32", 8, {"tensor_parallel_size": 16})
    whole = llm.engine_arguments(options)
    for number, part in enumerate(options.on_nodes(2, "10.0.0.1", 7)):
        place = {"nnodes": 2, "node_rank": number, "master_addr": "10.0.0.1", "master_port": 7}
        assert llm.engine_arguments(part) == {**whole, **place}
