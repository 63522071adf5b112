"""verl's recipes for asynchronous training mean here what they mean there, or are refused key by key."""

from typing import Any

import pytest
from sound_run import sound_run

from verl_rc.config.async_checks import check_async_training
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_config
from verl_rc.config.run import RunConfig
from verl_rc.config.verl.migration import migrate

FULLY_ASYNC = [
    *("data.train_batch_size=0", "data.gen_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=32"),
    *(
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.n=16",
        "actor_rollout_ref.rollout.mode=async",
    ),
    *(
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=8",
    ),
    *(
        "rollout.nnodes=2",
        "rollout.n_gpus_per_node=4",
        "rollout.total_rollout_steps=51200",
        "rollout.test_freq=10",
    ),
    *("async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=4"),
    *("async_training.require_batches=4", "async_training.partial_rollout=True"),
    "async_training.use_rollout_log_probs=True",
]
"""verl's recipe dapo_7b_math_fsdp2_8_8, shortened, with more rollout nodes."""
SEPARATE = ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=False"]
CORRECTION = "algorithm.rollout_correction.preset=decoupled_token_is"


def load(*overrides: str) -> RunConfig:
    keys = {one.lstrip("+").partition("=")[0] for one in overrides}
    return load_config(RunConfig, [*sound_run(without=keys), *overrides])


def test_a_fully_asynchronous_recipe() -> None:
    config = load(*FULLY_ASYNC)
    options = config.async_training
    assert (config.data.train_batch_size, config.data.gen_batch_size) == (128, 128)
    assert (config.num_ranks, config.num_engines) == (8, 8)
    assert config.trainer.total_training_steps == 51200 // 128
    assert config.trainer.test_freq == 10 * 4
    assert config.algorithm.rollout_correction.bypass_mode
    assert (options.resolved_order, options.oldest, options.groups_in_memory(128)) == ("ready", 9, 768)
    assert list(check_async_training(config)) == []


def test_a_one_step_off_recipe() -> None:
    """Its own entry point is what makes it asynchronous in verl; here one key does."""
    one_step_off = [
        "actor_rollout_ref.hybrid_engine=False",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=2",
        CORRECTION,
    ]
    own = ["async_training.staleness_threshold=1", "async_training.partial_rollout=False"]
    config = load(*one_step_off, "actor_rollout_ref.rollout.tensor_model_parallel_size=2", *own)
    assert (config.num_engines, config.async_training.oldest) == (1, 1)
    assert list(check_async_training(config)) == []


OF_VERLS_FILES: dict[str, Any] = {
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
    "async_training.partial_rollout": True,
    "async_training.use_trainer_do_validate": False,
    "async_training.use_dynamic_resource_scheduling": False,
    "async_training.dynamic_schedule_policy": "default",
    "async_training.dynamic_schedule_deactivate_ratio": 0.3,
    "async_training.dynamic_schedule_enable_rebalance": True,
    "async_training.concurrent_samples_per_replica": 16,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "rollout.n": 4,
    "rollout.total_rollout_steps": 51200,
    "data.gen_batch_size": 1,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.standalone_gpu_memory_utilization": None,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
    "actor_rollout_ref.actor.use_rollout_log_probs": True,
    "actor_rollout_ref.model.use_remove_padding": True,
    "algorithm.rollout_correction.bypass_mode": True,
}
"""Every key of fully_async_ppo_trainer.yaml and one_step_off_ppo_trainer.yaml, with its value there."""


def test_every_key_of_verls_files_is_known() -> None:
    given = [f"{key}={'null' if value is None else value}" for key, value in OF_VERLS_FILES.items()]
    config = load_config(
        RunConfig, [*sound_run(without={*OF_VERLS_FILES, "actor_rollout_ref.rollout.n"}), *given]
    )
    options = config.async_training
    assert (
        options.staleness_threshold,
        options.trigger_parameter_sync_step,
        options.max_concurrent_rollouts,
    ) == (0.1, 4, 64)
    assert (config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.rollout.n_gpus_per_node) == (4, 8)
    assert config.algorithm.rollout_correction.bypass_mode
    assert config.trainer.total_training_steps == 51200 // 16  # of one mini-batch


OTHER_VALUES_OF_VERL = [
    ("async_training.concurrent_samples_per_replica=15", None),
    ("async_training.staleness_threshold=0.3", None),
    ("actor_rollout_ref.rollout.standalone_gpu_memory_utilization=0.5", "write gpu_memory_utilization"),
    ("async_training.use_trainer_do_validate=True", "validation runs on the engines; write False"),
    ("async_training.use_dynamic_resource_scheduling=True", "devices keep their role; write False"),
    ("async_training.compute_prox_log_prob=True", "bypass_mode=False recomputes the proximal policy"),
]


@pytest.mark.parametrize(
    ("override", "said"), OTHER_VALUES_OF_VERL, ids=[one for one, _ in OTHER_VALUES_OF_VERL]
)
def test_other_values_are_taken_over_or_refused_key_by_key(override: str, said: str | None) -> None:
    given = [one for one in FULLY_ASYNC if not one.startswith(override.partition("=")[0])]
    if said is None:
        assert list(check_async_training(load(*given, override))) == []
        return
    try:
        messages = list(check_async_training(load(*given, override)))
    except ConfigError as error:
        messages = [str(error)]
    (message,) = messages
    assert said in message


@pytest.mark.parametrize(
    ("given", "most"),
    [(15, 240), (16, None), (999, None), ("16 actor_rollout_ref.rollout.multi_turn.enable=True", 256)],
)
def test_verl_counts_prompts_with_16_samples_and_an_engine_never_decodes_more_than_256(
    given: Any, most: int | None
) -> None:
    overrides = f"async_training.concurrent_samples_per_replica={given}".split()
    assert load(*FULLY_ASYNC, *overrides).async_training.max_concurrent_rollouts == most


def test_separate_async_brings_verls_defaults_and_yields_to_what_is_given() -> None:
    options = load(*SEPARATE, CORRECTION).async_training
    assert (options.staleness_threshold, options.trigger_parameter_sync_step) == (1, 4)
    assert (options.max_off_policy_threshold, options.max_off_policy_strategy) == (8, "drop")
    given = [
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.v1.sampler.max_off_policy_strategy=wait",
    ]
    options = load(*SEPARATE, CORRECTION, *given).async_training
    assert (options.trigger_parameter_sync_step, options.max_off_policy_strategy) == (2, "wait")


def test_a_hard_bound_below_the_lead_is_refused_in_verls_words_too() -> None:
    given = [
        "trainer.v1.separate_async.num_warmup_batches=2",
        "trainer.v1.sampler.max_off_policy_threshold=1",
    ]
    (message,) = check_async_training(load(*SEPARATE, CORRECTION, *given))
    assert "max_off_policy_threshold must be at least async_training.staleness_threshold=2" in message


def test_keys_of_a_mode_that_is_off_mean_nothing() -> None:
    synchronous = load("trainer.v1.trainer_mode=sync", "trainer.v1.separate_async.parameter_sync_step=4")
    assert synchronous.async_training == load().async_training


SAY_NOTHING = [
    "async_training.use_rollout_log_probs=False",
    "+actor_rollout_ref.actor.use_rollout_log_probs=False",
    "async_training.use_trainer_do_validate=False",
    "async_training.use_dynamic_resource_scheduling=False",
    "async_training.compute_prox_log_prob=False",
    "async_training.checkpoint_engine.enable=True",
    "trainer.v1.sampler.custom_sampler.path=null",
]


@pytest.mark.parametrize("override", SAY_NOTHING)
def test_values_that_say_what_happens_anyway(override: str) -> None:
    assert load(override).model_dump() == load().model_dump()


REFUSED: list[tuple[list[str], str]] = [
    (["trainer.v1.trainer_mode=colocate_async"], "take turns with it; write sync"),
    (["async_training.use_trainer_do_validate=True"], "validation runs on the engines; write False"),
    (["async_training.use_dynamic_resource_scheduling=True"], "devices keep their role"),
    (
        ["async_training.use_dynamic_resource_scheduling=True", "async_training.dynamic_schedule_policy=own"],
        "async_training.dynamic_schedule_policy=own is refused: devices keep their role",
    ),
    (
        [*SEPARATE, "trainer.v1.separate_async.hybrid_rollout.enable_switch=True"],
        "the trainer's devices never sample",
    ),
    (["trainer.v1.sampler.custom_sampler.path=a.py"], "write async_training.order"),
    (
        ["async_training.use_rollout_log_probs=True", "algorithm.rollout_correction.bypass_mode=False"],
        "are one option; give it once",
    ),
    (["rollout.n=4", "actor_rollout_ref.rollout.n=2"], "are one option; give it once"),
    (["rollout.ghost=4"], "rollout.ghost"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[row[0][-1] for row in REFUSED])
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["rollout.total_rollout_steps=4096", "data.train_batch_size=512"], "trainer.total_training_steps=8"),
        (["rollout.test_freq=-1", "async_training.trigger_parameter_sync_step=4"], "trainer.test_freq=-1"),
        (["rollout.test_freq=5"], "trainer.test_freq=5"),
        (["trainer.v1.trainer_mode=separate_async"], "async_training.trigger_parameter_sync_step=4"),
    ],
)
def test_a_migration_writes_own_keys(given: list[str], expected: Any) -> None:
    assert expected in migrate(given).overrides
