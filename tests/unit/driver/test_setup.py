"""What a configuration means for the engines, and for how long a run is."""

from pathlib import Path

import pytest
from small_models import small_run_config

from verl_rc.driver.setup import engine_options, steps_of_run


@pytest.mark.parametrize(("device", "given", "cut"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)])
def test_prompts_are_cut_on_a_gpu_only(device: str, given: bool, cut: bool, tmp_path: Path) -> None:
    """On a CPU vLLM fails with "CPU Generator does not use offset" when a seeded request's prompt is cut."""
    config = small_run_config(tmp_path, f"actor_rollout_ref.rollout.enable_chunked_prefill={given}")
    assert engine_options(config, device).arguments["enable_chunked_prefill"] is cut


def test_an_engines_own_arguments_win(tmp_path: Path) -> None:
    config = small_run_config(tmp_path, "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32")
    assert engine_options(config, "cpu").arguments["block_size"] == 32


@pytest.mark.parametrize(
    ("asked", "steps", "is_said"), [("null", 14, False), ("14", 14, False), ("9", 9, False), ("15", 14, True)]
)
def test_a_run_is_no_longer_than_its_prompts_and_says_so(
    asked: str, steps: int, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("verl_rc.driver.setup.say", lambda message, *values: lines.append(message % values))
    config = small_run_config(tmp_path, "trainer.total_epochs=2", f"trainer.total_training_steps={asked}")
    assert steps_of_run(config, steps_of_epoch=7) == steps
    said = ["the prompts last for 14 steps, fewer than trainer.total_training_steps=15: raise trainer.total_epochs"]
    assert lines == (said if is_said else [])
