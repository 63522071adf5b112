"""Adapters in the engines, and an engine of the reward model: what is refused before a run starts."""

import pytest
from sound_run import sound_run

from verl_rc.config.device_checks import check_device
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.config.run import RunConfig

M, R = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
APART = f"{M}.lora.merge=False"


def load(*overrides: str) -> RunConfig:
    keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    return load_run_config([*sound_run("grpo", without=keys), *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{M}.lora_rank=513", APART], "lora_rank of at most 512, .* got 513; lower it, or pass merge=True"),
        (
            [f"{M}.lora_rank=8", APART, f"{R}.dtype=float32", "trainer.device=cuda"],
            f"{R}.dtype=bfloat16 or float16 on a GPU, .*; pass one of them, or merge=True",
        ),
        (
            [f"+{R}.engine_kwargs.vllm.max_lora_rank=8"],
            f"engine_kwargs.vllm.max_lora_rank=8 is refused: write {M}.lora.merge=False",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(*overrides)
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_merged_has_no_such_limits() -> None:
    config = load(f"{M}.lora_rank=513", f"{R}.dtype=float32", "trainer.device=cuda")
    assert config.actor_rollout_ref.model.adapter_rank == 0
    assert not [*check_device(config, "cuda")]


def test_a_machine_that_auto_has_found_to_have_gpus_is_judged_too() -> None:
    config = load(f"{M}.lora_rank=8", APART, f"{R}.dtype=float32", "trainer.device=auto")
    assert not [*check_device(config, "cpu")]
    (problem,) = check_device(config, "cuda")
    assert "no kernel for adapters in float32" in problem


JUDGE = "reward.reward_model"
SERVED = (f"{JUDGE}.enable=True", f"{JUDGE}.model_path=judge", f"{JUDGE}.rollout.name=vllm")


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 2), ("cpu", 0)])
def test_vllm_serves_a_reward_model_where_the_trainer_computes(device: str, gpus: int) -> None:
    served = (*SERVED, f"{JUDGE}.rollout.tensor_model_parallel_size=2", f"trainer.device={device}")
    assert load(*served, f"{JUDGE}.n_gpus_per_node={gpus}").reward.reward_model.n_gpus_per_node == gpus
    with pytest.raises(
        ConfigError, match=rf"kind of device, {device}; pass {JUDGE}.n_gpus_per_node={gpus}\."
    ):
        load(*served, f"{JUDGE}.n_gpus_per_node={2 - gpus}")
    load(*SERVED[:2], f"trainer.device={device}", f"{JUDGE}.n_gpus_per_node=1")  # transformers


def test_engines_that_sleep_sample_no_refill() -> None:
    rejection = ("algorithm.rollout_correction.rollout_rs=seq_mean_k1", "algorithm.max_refills=1")
    config = load(*rejection, "algorithm.rollout_correction.rollout_rs_threshold=0.9_1.1")
    assert not [*check_device(config, "cpu")]
    (problem,) = check_device(config, "cuda")
    assert "pass actor_rollout_ref.hybrid_engine=False" in problem
