"""A real vLLM serves what was exported: the merged folder, and the adapter over its base model."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import write_checkpoint
from small_models import small_run_config
from small_runs import ROOT
from transformers import AutoModelForCausalLM

from verl_rc.cli import main
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.workers.environment import engine_environment

PROMPT = "4071835926="
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def exported(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``base``, and the same trained policy as ``merged`` and as ``adapter``."""
    folder = tmp_path_factory.mktemp("exported")
    lora = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16")
    write_checkpoint(small_run_config(task["model"], *lora), folder / "global_step_3")
    command = [sys.executable, "-m", "verl_rc.cli", "export", "global_step_3", "--output", "merged"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == f"{folder / 'merged'}: Qwen2ForCausalLM after step 3, float32\n"
    assert result.stderr == ""
    assert (
        main(["export", str(folder / "global_step_3"), "--output", str(folder / "adapter"), "--adapter"]) == 0
    )
    return {"base": task["model"], "merged": folder / "merged", "adapter": folder / "adapter"}


def served_tokens(model: Path, adapter: Path | None = None) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and of its greedy continuation by a vLLM in a process of its own."""
    environment = engine_environment(num_threads=1, device="cpu", one_node=True)
    process = ChildProcess(
        "plain_engine:PlainEngine", environment, model=str(model), adapter=adapter and str(adapter)
    )
    try:
        prompt, tokens = process.call("continue_greedily", PROMPT, NUM_TOKENS)
        return prompt, tokens
    finally:
        process.end()


def greedy_tokens(model: Any, prompt: list[int]) -> list[int]:
    """The same continuation by transformers, with every choice clear enough to survive another order of
    additions."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            best, second = model(torch.tensor([tokens])).logits[0, -1].topk(2).values.tolist()
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert best - second > 1e-4
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("with_adapter", [False, True], ids=["merged", "adapter"])
def test_vllm_continues_as_transformers_does(exported: dict[str, Path], with_adapter: bool) -> None:
    if with_adapter:
        prompt, served = served_tokens(exported["base"], exported["adapter"])
    else:
        prompt, served = served_tokens(exported["merged"])
    assert prompt == [ord(letter) - ord("!") for letter in PROMPT]
    assert served == greedy_tokens(AutoModelForCausalLM.from_pretrained(exported["merged"]), prompt)
    assert served != greedy_tokens(AutoModelForCausalLM.from_pretrained(exported["base"]), prompt)
