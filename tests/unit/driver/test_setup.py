"""What a configuration means for the engines."""

from pathlib import Path

import pytest
from small_models import small_run_config

from verl_rc.driver.setup import engine_options


@pytest.mark.parametrize(("device", "given", "cut"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)])
def test_prompts_are_cut_on_a_gpu_only(device: str, given: bool, cut: bool, tmp_path: Path) -> None:
    """On a CPU vLLM fails with "CPU Generator does not use offset" when a seeded request's prompt is cut."""
    config = small_run_config(tmp_path, f"actor_rollout_ref.rollout.enable_chunked_prefill={given}")
    assert engine_options(config, device).arguments["enable_chunked_prefill"] is cut


def test_an_engines_own_arguments_win(tmp_path: Path) -> None:
    config = small_run_config(tmp_path, "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32")
    assert engine_options(config, "cpu").arguments["block_size"] == 32
