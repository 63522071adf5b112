"""What cannot go with asynchronous training, one sentence each, before anything starts."""

import pytest
from sound_run import sound_run

from verl_rc.config.async_checks import check_async_training
from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.config.load import load_config, load_run_config
from verl_rc.config.run import RunConfig
from verl_rc.plan.explain import plan_text

S, ROLLOUT = "async_training", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
OWN_DEVICES = "actor_rollout_ref.hybrid_engine=False"
CHOSEN = f"{CORRECTION}.preset=decoupled_token_is"
WHOLE = f"{S}.staleness_threshold=1 {S}.partial_rollout=False"
TOOLS = f"{ROLLOUT}.multi_turn.enable=True"


def config_of(overrides: str) -> RunConfig:
    given = overrides.split()
    return load_config(RunConfig, [*sound_run(without={one.partition("=")[0] for one in given}), *given])


SOUND = [
    "",
    f"{S}.partial_rollout=False",
    f"{S}.staleness_threshold=1 {OWN_DEVICES} {CHOSEN}",
    f"{S}.staleness_threshold=1 {OWN_DEVICES} {CORRECTION}.preset=disabled",
    f"{S}.staleness_threshold=1 {OWN_DEVICES} {CORRECTION}.preset=disabled {CORRECTION}.diagnostics=full",
    f"{S}.staleness_threshold=1 {OWN_DEVICES} {CORRECTION}.rollout_rs=token_k1 "
    f"{CORRECTION}.rollout_rs_threshold=2",
    f"{S}.staleness_threshold=0.5 {OWN_DEVICES} {CHOSEN}",
    f"{S}.staleness_threshold=0.5 {S}.trigger_parameter_sync_step=4 {S}.order=admitted {OWN_DEVICES} {CHOSEN}",  # noqa: E501
    f"{S}.trigger_parameter_sync_step=4 {CHOSEN} trainer.test_freq=8",
    f"{S}.staleness_threshold=1 {S}.partial_rollout=False {S}.max_off_policy_threshold=1 {OWN_DEVICES} "
    f"{CHOSEN}",
    f"{S}.staleness_threshold=1 {S}.max_off_policy_strategy=drop {S}.max_off_policy_threshold=2 "
    f"{OWN_DEVICES} {CHOSEN}",
    f"{S}.staleness_threshold=1 {S}.deterministic_steps=20 {OWN_DEVICES} {CHOSEN}",
    f"{S}.staleness_threshold=1 {S}.deterministic_steps=4 {OWN_DEVICES} {CHOSEN} {TOOLS}",
    f"{S}.trigger_parameter_sync_step=2 {S}.partial_rollout=False {S}.order=ready {CHOSEN}",
    f"{S}.staleness_threshold=0.5 {S}.partial_rollout=False {S}.order=ready {OWN_DEVICES} {CHOSEN}",
    f"{S}.staleness_threshold=1 {S}.partial_rollout=False {S}.trigger_parameter_sync_step=2 "
    f"{S}.max_token_age=2 {OWN_DEVICES} {CHOSEN}",
    f"{S}.staleness_threshold=1 {S}.max_concurrent_rollouts=256 {OWN_DEVICES} {CHOSEN}",
    f"{S}.staleness_threshold=1 {S}.max_concurrent_rollouts=999 {OWN_DEVICES} {CHOSEN} {TOOLS}",
    f"{S}.staleness_threshold=1 {OWN_DEVICES} {CHOSEN} {CORRECTION}.proximal=interpolate",
    f"{S}.staleness_threshold=1 {OWN_DEVICES} {CHOSEN} {ROLLOUT}.checkpoint_engine.stage_updates=True "
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{S}.staleness_threshold=1 {OWN_DEVICES} {CHOSEN} {ROLLOUT}.checkpoint_engine.stage_updates=True "
    f"{ROLLOUT}.tensor_model_parallel_size=1 {S}.partial_rollout=False",
    f"{S}.require_batches=2",
    f"{S}.require_batches=2 data.train_batch_size=32",
]


@pytest.mark.parametrize("overrides", SOUND)
def test_what_goes_together(overrides: str) -> None:
    assert list(check_async_training(config_of(overrides))) == []


STAGE = f"{ROLLOUT}.checkpoint_engine.stage_updates=True {ROLLOUT}.tensor_model_parallel_size=1"
INTERPOLATE = f"{CORRECTION}.proximal=interpolate"
AHEAD = f"{S}.staleness_threshold=1 {OWN_DEVICES} {CHOSEN}"
Mistake = tuple[str, str, str]
"""Overrides that hold it; what the message says first, and what it says to write."""
MISTAKES: list[Mistake] = [
    (
        f"{S}.staleness_threshold=1 {CHOSEN}",
        f"{S}.staleness_threshold=1 needs engines that work while",
        f"pass {OWN_DEVICES}",
    ),
    (
        f"{S}.staleness_threshold=1 {OWN_DEVICES}",
        f"{S}.staleness_threshold=1 with",
        f"pass {CORRECTION}.preset=",
    ),
    (
        f"{S}.staleness_threshold=1 {OWN_DEVICES} {CORRECTION}.diagnostics=full",
        "none was chosen",
        "preset=disabled",
    ),
    (
        f"{S}.trigger_parameter_sync_step=2",
        "trigger_parameter_sync_step=2 trains on tokens of older weights",
        "preset=disabled",
    ),
    (
        f"{S}.staleness_threshold=0.25 {S}.partial_rollout=False {OWN_DEVICES} {CHOSEN}",
        "is 0.25 steps, and fractions of a step buy nothing",
        "pass 0,",
    ),
    (
        f"{S}.staleness_threshold=0.7 {S}.trigger_parameter_sync_step=2 {S}.order=admitted {OWN_DEVICES} "
        f"{CHOSEN}",
        "is 1.4 steps, and fractions of a step buy nothing",
        "pass 0.5,",
    ),
    (
        f"{AHEAD} {S}.max_off_policy_threshold=1.5",
        "a fraction of a step bounds nothing",
        "pass 2, which means the same",
    ),
    (f"{AHEAD} {S}.max_off_policy_threshold=0", f"must be at least {S}.staleness_threshold=1", "raise it"),
    (
        f"{AHEAD} {S}.max_off_policy_threshold=2 {S}.partial_rollout=False",
        "=2.0 has no effect in the order of admission",
        f"{S}.order=ready",
    ),
    (
        f"{AHEAD} {S}.max_off_policy_strategy=drop",
        "drop needs the bound",
        f"pass {S}.max_off_policy_threshold=",
    ),
    (
        f"{AHEAD} {S}.max_off_policy_strategy=drop {S}.partial_rollout=False",
        "drop has no effect in the order of admission",
        f"{S}.order=ready",
    ),
    (
        f"{AHEAD} {S}.deterministic_steps=5 {S}.order=ready",
        f"{S}.order=ready was given",
        "pass order=admitted",
    ),
    (
        f"{AHEAD} {S}.deterministic_steps=5 {S}.kv_cache_on_update=keep",
        "depend on a cache that no checkpoint holds",
        "drop one",
    ),
    (
        f"{AHEAD} {S}.deterministic_steps=5 {S}.partial_rollout=False",
        "deterministic_steps=5 has no effect",
        "drop one",
    ),
    (
        f"{AHEAD} {S}.kv_cache_on_update=keep {S}.partial_rollout=False",
        "kv_cache_on_update=keep has no effect",
        "drop one",
    ),
    (f"{AHEAD} {S}.max_concurrent_rollouts=300", f"must be at most {ROLLOUT}.max_num_seqs=256", "raise that"),
    (
        f"{S}.trigger_parameter_sync_step=2 {CHOSEN} trainer.test_freq=5",
        "trainer.test_freq must be a multiple of",
        "for example 6",
    ),
    (
        f"{S}.trigger_parameter_sync_step=2 {CHOSEN} {S}.max_off_policy_threshold=1",
        "without a lead",
        "drop it",
    ),
    (
        f"{S}.trigger_parameter_sync_step=2 {CHOSEN} {S}.max_off_policy_strategy=drop",
        "drop has no effect without a lead",
        "raise that, or drop it",
    ),
    (
        f"{S}.trigger_parameter_sync_step=2 {CHOSEN} {S}.kv_cache_on_update=keep",
        f"kv_cache_on_update=keep has no effect with {S}.staleness_threshold=0",
        "drop one of them",
    ),
    (f"{AHEAD} {S}.max_token_age=2", "is never passed", "pass at most 1"),
    (f"{AHEAD} {S}.partial_rollout=False {S}.max_token_age=0", "rejects all tokens once", "pass 1 or more"),
    (
        f"{S}.staleness_threshold=1 {S}.max_token_age=1 {OWN_DEVICES} {CORRECTION}.bypass_mode=True",
        "the actor decides which tokens it keeps",
        "drop one of them",
    ),
    (f"{STAGE}", "nothing runs in the engines at a publication", "or drop it"),
    (
        f"{AHEAD} {ROLLOUT}.checkpoint_engine.stage_updates=True",
        "needs engines of one device",
        "drop one of them",
    ),
    (f"{INTERPOLATE}", "which is 0 in a synchronous run", "pass proximal=recompute"),
    (
        f"{AHEAD} {INTERPOLATE} {S}.max_token_age=1",
        "proximal=interpolate the actor decides which tokens",
        "drop one of them",
    ),
    (
        f"{AHEAD} {INTERPOLATE} algorithm.use_kl_in_reward=True",
        "computes no proximal policy",
        "use_kl_loss=True instead",
    ),
    (
        f"{AHEAD} {INTERPOLATE} actor_rollout_ref.actor.policy_loss.loss_mode=bapo",
        "loss_mode=bapo, which looks at the whole mini-batch first",
        "pass proximal=recompute",
    ),
    (
        f"{AHEAD} {S}.partial_rollout=False {S}.order=ready",
        "order=ready has no effect",
        "raise trigger_parameter_sync_step",
    ),
    (
        f"{AHEAD} {S}.partial_rollout=False {S}.order=ready {S}.trigger_parameter_sync_step=2 "
        f"{S}.max_off_policy_threshold=2",
        "where all responses end before the next publication",
        "drop it",
    ),
    (
        f"{AHEAD} {S}.partial_rollout=False {S}.order=ready {S}.trigger_parameter_sync_step=2 "
        f"{S}.max_off_policy_strategy=drop",
        "nothing grows too old",
        "drop it",
    ),
    (
        f"{S}.require_batches=3 data.train_batch_size=32",
        "prompts make a step of 48, and data.train_batch_size must be that; got 32",
        "Pass one",
    ),
    *(
        (f"{S}.{given}", f"{S}.{given} has no effect in a synchronous run", "raise one of these, or drop it")
        for given in (
            *(
                "max_off_policy_threshold=1.0",
                "max_off_policy_strategy=drop",
                "order=ready",
                "kv_cache_on_update=keep",
            ),
            *(
                "max_token_age=1",
                "deterministic_steps=9",
                "group_timeout_seconds=9.0",
                "max_concurrent_rollouts=9",
            ),
        )
    ),
]


@pytest.mark.parametrize(("overrides", "must", "write"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES])
def test_a_contradiction_gives_one_sentence(overrides: str, must: str, write: str) -> None:
    (message,) = check_async_training(config_of(overrides))
    assert must in message
    assert write in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("given", ["", f"{S}.order=admitted", f"{S}.max_off_policy_threshold=1"])
def test_one_step_off_is_accepted(given: str) -> None:
    overrides = f"{WHOLE} {given} {OWN_DEVICES} {CHOSEN}".split()
    config = load_run_config([*sound_run(without={one.partition("=")[0] for one in overrides}), *overrides])
    assert config.async_training.oldest == 1


READY = (
    f"{S}.staleness_threshold=1 {S}.trigger_parameter_sync_step=2 {S}.partial_rollout=False {S}.order=ready"
)
PARTIAL = f"{S}.staleness_threshold=1"
ACTS: dict[str, tuple[str, str]] = {
    "staleness_threshold": (WHOLE, "2"),
    "trigger_parameter_sync_step": (WHOLE, "3"),
    "require_batches": (WHOLE, "3 data.train_batch_size=0"),
    "partial_rollout": (PARTIAL, "False"),
    "order": (READY, "admitted"),
    "max_off_policy_threshold": (PARTIAL, "3"),
    "max_off_policy_strategy": (f"{PARTIAL} {S}.max_off_policy_threshold=2", "drop"),
    "max_token_age": (READY, "2"),
    "group_timeout_seconds": (WHOLE, "9"),
    "kv_cache_on_update": (PARTIAL, "keep"),
    "deterministic_steps": (PARTIAL, "9"),
    "trace": (WHOLE, "True"),
    "max_concurrent_rollouts": (WHOLE, "8"),
}
"""A run in which the key acts, and another value of it."""


@pytest.mark.parametrize("key", AsyncTrainingConfig.model_fields)
def test_every_key_changes_the_plan_or_is_refused(key: str) -> None:
    """T20: no dead keys. That the driver does what the plan says is shown in
    tests/unit/trainer/test_asynchronous_modes.py."""
    base, value = ACTS[key]
    with_key = [one for one in base.split() if not one.startswith(f"{S}.{key}=")]
    plans = []
    for given in (base.split(), [*with_key, f"{S}.{key}={value}"]):
        config = config_of(f"{' '.join(given)} {OWN_DEVICES} {CHOSEN} trainer.save_freq=1")
        assert not list(check_async_training(config)), given
        plans.append(plan_text(config))
    assert plans[0] != plans[1]


def test_dropping_is_warned_of_at_the_start() -> None:
    dropping = (
        f"{PARTIAL} {S}.max_off_policy_threshold=2 {S}.max_off_policy_strategy=drop {OWN_DEVICES} {CHOSEN}"
    )
    plan = plan_text(config_of(dropping))
    assert "what would be older than 2 step(s) is dropped and replaced" in plan
    assert "drop throws sampled tokens away" in plan
    assert "drop throws" not in plan_text(config_of(dropping.replace("=drop", "=wait")))


@pytest.mark.parametrize(
    "given", ["order=admitted", "deterministic_steps=7", f"order=admitted {S}.kv_cache_on_update=keep"]
)
def test_weights_that_change_under_responses_are_accepted(given: str) -> None:
    overrides = f"{S}.staleness_threshold=1 {S}.{given} {OWN_DEVICES} {CHOSEN}".split()
    config = load_run_config([*sound_run(without={one.partition("=")[0] for one in overrides}), *overrides])
    assert config.async_training.on_update in ("recompute", "keep")


@pytest.mark.parametrize("given", ["", "data.train_batch_size=0", "data.train_batch_size=48"])
def test_a_step_may_be_given_in_mini_batches(given: str) -> None:
    arguments = [*sound_run(without={"data.train_batch_size"}), f"{S}.require_batches=3", *given.split()]
    assert load_run_config(arguments).data.train_batch_size == 48
