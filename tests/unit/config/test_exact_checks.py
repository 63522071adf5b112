"""Exact mode is refused, in one sentence, where it has not been shown."""

import re
from collections.abc import Sequence

import pytest
from sound_run import sound_run

from verl_rc.config.checks import check_run
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.config.run import RunConfig

A, R, F = "actor_rollout_ref", "actor_rollout_ref.rollout", "fsdp_config.dtype"
EXACT = [
    *(f"{A}.exact=True", f"{R}.dtype=bfloat16", f"{A}.actor.{F}=bf16", f"{A}.ref.{F}=bfloat16"),
    *(f"{R}.tensor_model_parallel_size=1", f"{A}.actor.use_kl_loss=True", f"{R}.quantization=null"),
]


def load(*overrides: str) -> RunConfig:
    def keys(given: Sequence[str]) -> set[str]:
        return {override.partition("=")[0].lstrip("+") for override in given}

    exact = [override for override in EXACT if not keys([override]) & keys(overrides)]
    return load_run_config([*sound_run("grpo", without=keys([*exact, *overrides])), *exact, *overrides])


def test_one_precision_for_all_passes() -> None:
    assert load().actor_rollout_ref.exact


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            f"{R}.quantization=fp8_per_channel",
            f"{R}.quantization=fp8_per_channel; pass {R}.quantization=null",
        ),
        (f"{R}.kv_cache_dtype=fp8", f"{R}.kv_cache_dtype=fp8; pass {R}.kv_cache_dtype=auto"),
        (f"{R}.tensor_model_parallel_size=2", f"{R}.tensor_model_parallel_size=2; pass"),
        (f"+{R}.engine_kwargs.vllm.compilation_config=3", "compilation_config=3; pass"),
        (f"+{R}.engine_kwargs.vllm.attention_backend=FLASH_ATTN", "attention_backend=FLASH_ATTN; pass"),
        (f"{A}.model.lora_rank=8", f"{A}.model.lora_rank=8; pass {A}.model.lora_rank=0"),
        (f"{A}.model.head_dtype=float32", f"{A}.model.head_dtype=float32; pass {A}.model.head_dtype=null"),
        (f"{R}.top_k=20", f"{R}.top_k=20; pass {R}.top_k=-1"),
        (f"{R}.dtype=float32", f"got {R}.dtype=float32 and {A}.actor.{F}=bf16"),
        (f"{A}.ref.{F}=fp32", f"got {R}.dtype=bfloat16 and {A}.ref.{F}=fp32"),
        (f"{R}.dtype=float16", f"not proven in float16, got {R}.dtype=float16"),
        (f"{A}.actor.fsdp_config.ulysses_sequence_parallel_size=2", "ulysses_sequence_parallel_size=2; pass"),
    ],
)
def test_what_is_not_proven_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check_run(load(override))


def test_a_cache_of_older_weights_is_refused() -> None:
    keep = [
        *("async_training.staleness_threshold=1", "async_training.partial_rollout=True"),
        *("async_training.kv_cache_on_update=keep", f"{A}.hybrid_engine=False"),
    ]
    with pytest.raises(ConfigError, match=r"kv_cache_on_update=keep; pass .*=recompute"):
        load(*keep, "algorithm.rollout_correction.preset=decoupled_token_is")
    assert load(*keep[:2], keep[3], "algorithm.rollout_correction.preset=decoupled_token_is")
