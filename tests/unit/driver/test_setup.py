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


S = "async_training"


@pytest.mark.parametrize(
    ("given", "on_update", "steps"),
    [
        ((), "finish", None),
        ((f"{S}.staleness_threshold=1", f"{S}.partial_rollout=False"), "finish", None),
        ((f"{S}.staleness_threshold=1", f"{S}.order=admitted"), "recompute", None),
        ((f"{S}.staleness_threshold=1", f"{S}.order=admitted", f"{S}.kv_cache_on_update=keep"), "keep", None),
        ((f"{S}.staleness_threshold=1", f"{S}.deterministic_steps=9"), "recompute", 9),
    ],
)
def test_what_an_engine_does_to_running_responses_at_an_update(
    given: tuple[str, ...], on_update: str, steps: int | None, tmp_path: Path
) -> None:
    """T10, T16: and that tokens are processed before the next version comes."""
    chosen = "algorithm.rollout_correction.preset=decoupled_token_is"
    config = small_run_config(tmp_path, *given, chosen, "actor_rollout_ref.hybrid_engine=False")
    options = engine_options(config, "cuda")
    assert (options.on_update, options.deterministic_steps) == (on_update, steps)
    assert options.arguments.get("async_scheduling") == (None if on_update == "finish" else False)


def test_an_engine_knows_how_many_samples_it_may_work_on(tmp_path: Path) -> None:
    given = (f"{S}.staleness_threshold=1", f"{S}.max_concurrent_rollouts=5", "actor_rollout_ref.hybrid_engine=False")
    config = small_run_config(tmp_path, *given, "algorithm.rollout_correction.preset=decoupled_token_is")
    assert engine_options(config, "cpu").max_concurrent == 5


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
