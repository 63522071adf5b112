"""What a configuration means for the engines, and for how long a run is."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_models import small_run_config
from small_runs import ROOT

from verl_rc.config.errors import ConfigError
from verl_rc.config.rollout import OWNED_ENGINE_ARGUMENTS
from verl_rc.runtime.rollout.vllm.options import engine_options
from verl_rc.trainer import setup
from verl_rc.trainer.cluster.remote import RemoteError, _Process
from verl_rc.trainer.setup import steps_of_run


def test_gpus_that_pytorch_does_not_see_end_the_run_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is too old for PyTorch's CUDA is noticed by the first rank."""
    config = small_run_config(tmp_path, "trainer.device=cuda", "trainer.n_gpus_per_node=2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(setup, "model_paths", lambda _: {})

    class Processes:
        def gpu_bytes(self) -> int:
            try:
                return _Process.__ray_metadata__.modified_class._gpu_bytes(None)
            except ValueError as error:
                raise RemoteError("rank 0 failed", error) from error

    with pytest.raises(ConfigError, match=r"^trainer\.device=cuda needs .* verl-rc doctor says why"):
        setup._with_gradient_sums(config, Processes(), "cuda", tmp_path)


@pytest.mark.parametrize(
    ("device", "given", "cut"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_prompts_are_cut_on_a_gpu_only(device: str, given: bool, cut: bool, tmp_path: Path) -> None:
    """On a CPU vLLM fails with "CPU Generator does not use offset" when a seeded request's prompt is cut."""
    config = small_run_config(tmp_path, f"actor_rollout_ref.rollout.enable_chunked_prefill={given}")
    assert engine_options(config, device).arguments["enable_chunked_prefill"] is cut


def test_an_engines_own_arguments_win(tmp_path: Path) -> None:
    config = small_run_config(tmp_path, "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32")
    assert engine_options(config, "cpu").arguments["block_size"] == 32


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("more", [(), ("actor_rollout_ref.rollout.kv_cache_megabytes=64",)])
def test_every_argument_that_the_run_sets_is_refused_among_the_users(
    device: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    functions = [
        node
        for file in ("llm.py", "sampler.py")
        for node in ast.parse((ROOT / "verl_rc/runtime/rollout/vllm" / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in ("engine_arguments", "sampler_arguments")
    ]
    written = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Dict)]
    config = small_run_config(tmp_path, *more)
    of_the_run = {
        *engine_options(config, device).arguments,
        *(key.value for node in written for key in node.keys if isinstance(key, ast.Constant)),
    }
    assert {"model", "logprobs_mode", "node_rank", "kv_cache_dtype", "enforce_eager"} <= of_the_run
    # Of these overrides the run owns the head's precision, which is refused by itself.
    assert not of_the_run - set(OWNED_ENGINE_ARGUMENTS) - {"block_size", "hf_overrides"}


def test_the_users_async_scheduling_is_refused_where_the_run_turns_it_off(tmp_path: Path) -> None:
    given = (
        "actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling=True",
        "actor_rollout_ref.hybrid_engine=False",
    )
    assert engine_options(small_run_config(tmp_path, *given), "cpu").arguments["async_scheduling"] is True
    ahead = (f"{S}.staleness_threshold=1", "algorithm.rollout_correction.preset=decoupled_token_is")
    with pytest.raises(ConfigError, match=r"vllm.async_scheduling=True is refused: .* drop it"):
        small_run_config(tmp_path, *given, *ahead)


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
    given = (
        f"{S}.staleness_threshold=1",
        f"{S}.max_concurrent_rollouts=5",
        "actor_rollout_ref.hybrid_engine=False",
    )
    config = small_run_config(tmp_path, *given, "algorithm.rollout_correction.preset=decoupled_token_is")
    assert engine_options(config, "cpu").max_concurrent == 5


@pytest.mark.parametrize(
    ("asked", "steps", "is_said"), [("null", 14, False), ("14", 14, False), ("9", 9, False), ("15", 14, True)]
)
def test_a_run_is_no_longer_than_its_prompts_and_says_so(
    asked: str, steps: int, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("verl_rc.trainer.setup.log", lambda message, *values: lines.append(message % values))
    config = small_run_config(tmp_path, "trainer.total_epochs=2", f"trainer.total_training_steps={asked}")
    assert steps_of_run(config.trainer, steps_of_epoch=7) == steps
    said = [
        "the prompts last for 14 steps, fewer than trainer.total_training_steps=15: raise "
        "trainer.total_epochs"
    ]
    assert lines == (said if is_said else [])


@pytest.mark.parametrize("training", [True, False])
def test_a_missing_ground_truth_is_found_at_the_start_if_a_built_in_scorer_needs_it(
    training: bool, tmp_path: Path
) -> None:
    dataset = SimpleNamespace(
        without_ground_truth=lambda: "row 7 of a.parquet" if training else None, data_sources=dict
    )
    rows = [SimpleNamespace(row_index=3, data_source="digits", ground_truth="1" if training else None)]
    place = "row 7 of a.parquet" if training else r"row 3 of data\.val_files"
    with pytest.raises(
        ValueError, match=rf"ground_truth in a row's reward_model, but it is null in {place}\."
    ):
        setup._scored_sources(small_run_config(tmp_path), dataset, rows)
    own = small_run_config(tmp_path, "reward.custom_reward_function.path=my_reward.py")
    assert setup._scored_sources(own, dataset, rows).keys() == {"digits"}
