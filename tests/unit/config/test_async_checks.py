"""What cannot go with asynchronous training, and what of it is not built: one sentence each, before anything starts."""

import pytest
from sound_run import sound_run

from verl_rc.config.async_checks import UNBUILT, contradictions, refuse_unbuilt
from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_config, load_run_config
from verl_rc.config.run import RunConfig

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
    f"{S}.staleness_threshold=1 {OWN_DEVICES} {CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold=2",
    f"{S}.staleness_threshold=0.5 {OWN_DEVICES} {CHOSEN}",
    f"{S}.staleness_threshold=0.5 {S}.trigger_parameter_sync_step=4 {S}.order=admitted {OWN_DEVICES} {CHOSEN}",
    f"{S}.trigger_parameter_sync_step=4 {CHOSEN} trainer.test_freq=8",
    f"{S}.staleness_threshold=1 {S}.partial_rollout=False {S}.max_off_policy_threshold=1 {OWN_DEVICES} {CHOSEN}",
    f"{S}.staleness_threshold=1 {S}.max_off_policy_strategy=drop {S}.max_off_policy_threshold=2 {OWN_DEVICES} {CHOSEN}",
    f"{S}.staleness_threshold=1 {S}.deterministic_steps=20 {OWN_DEVICES} {CHOSEN}",
    f"{S}.require_batches=2",
    f"{S}.require_batches=2 data.train_batch_size=32",
]


@pytest.mark.parametrize("overrides", SOUND)
def test_what_goes_together(overrides: str) -> None:
    assert list(contradictions(config_of(overrides))) == []


AHEAD = f"{S}.staleness_threshold=1 {OWN_DEVICES} {CHOSEN}"
Mistake = tuple[str, str, str]
"""Overrides that hold it; what the message says first, and what it says to write."""
MISTAKES: list[Mistake] = [
    (f"{S}.staleness_threshold=1 {CHOSEN}", f"{S}.staleness_threshold=1 needs engines that work while", f"pass {OWN_DEVICES}"),
    (f"{S}.staleness_threshold=1 {OWN_DEVICES}", f"{S}.staleness_threshold=1 with", f"pass {CORRECTION}.preset="),
    (f"{S}.staleness_threshold=1 {OWN_DEVICES} {CORRECTION}.diagnostics=full", "none was chosen", "preset=disabled"),
    (f"{S}.trigger_parameter_sync_step=2", "trigger_parameter_sync_step=2 trains on tokens of older weights", "preset=disabled"),
    (
        f"{S}.staleness_threshold=0.25 {S}.partial_rollout=False {OWN_DEVICES} {CHOSEN}",
        "is 0.25 steps, and fractions of a step buy nothing",
        "pass 0,",
    ),
    (
        f"{S}.staleness_threshold=0.7 {S}.trigger_parameter_sync_step=2 {S}.order=admitted {OWN_DEVICES} {CHOSEN}",
        "is 1.4 steps, and fractions of a step buy nothing",
        "pass 0.5,",
    ),
    (f"{AHEAD} {S}.max_off_policy_threshold=1.5", "a fraction of a step bounds nothing", "pass 2, which means the same"),
    (f"{AHEAD} {S}.max_off_policy_threshold=0", f"must be at least {S}.staleness_threshold=1", "raise it"),
    (
        f"{AHEAD} {S}.max_off_policy_threshold=2 {S}.partial_rollout=False",
        "=2 has no effect in the order of admission",
        f"{S}.order=ready",
    ),
    (f"{AHEAD} {S}.max_off_policy_strategy=drop", "drop needs the bound", f"pass {S}.max_off_policy_threshold="),
    (
        f"{AHEAD} {S}.max_off_policy_strategy=drop {S}.partial_rollout=False",
        "drop has no effect in the order of admission",
        f"{S}.order=ready",
    ),
    (f"{AHEAD} {S}.deterministic_steps=5 {S}.order=ready", f"{S}.order=ready was given", "pass order=admitted"),
    (f"{AHEAD} {S}.deterministic_steps=5 {S}.partial_rollout=False", "deterministic_steps=5 has no effect", "drop one"),
    (f"{AHEAD} {S}.kv_cache_on_update=keep {S}.partial_rollout=False", "kv_cache_on_update=keep has no effect", "drop one"),
    (f"{AHEAD} {S}.max_concurrent_rollouts=300", f"must be at most {ROLLOUT}.max_num_seqs=256", "raise that"),
    (
        f"{S}.trigger_parameter_sync_step=2 {CHOSEN} trainer.test_freq=5",
        "trainer.test_freq must be a multiple of",
        "for example 6",
    ),
    (f"{S}.trigger_parameter_sync_step=2 {CHOSEN} {S}.max_off_policy_threshold=1", "without a lead", "drop it"),
    (f"{AHEAD} {S}.max_token_age=2", "is never passed", "pass at most 1"),
    (f"{S}.require_batches=3 data.train_batch_size=32", "prompts make a step of 48, but data.train_batch_size=32", "drop one"),
    *(
        (f"{S}.{given}", f"{S}.{given} has no effect in a synchronous run", "raise one of these, or drop it")
        for given in (
            *("max_off_policy_threshold=1.0", "max_off_policy_strategy=drop", "order=ready", "kv_cache_on_update=keep"),
            *("max_token_age=1", "deterministic_steps=9"),
        )
    ),
]


@pytest.mark.parametrize(("overrides", "must", "write"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES])
def test_a_contradiction_gives_one_sentence(overrides: str, must: str, write: str) -> None:
    (message,) = contradictions(config_of(overrides))
    assert must in message
    assert write in message
    assert message.endswith(".")
    assert "\n" not in message


OTHER_VALUES = {
    "max_off_policy_strategy": "drop",
    "trigger_parameter_sync_step": 2,
    "max_concurrent_rollouts": 4,
    "kv_cache_on_update": "keep",
    "deterministic_steps": 3,
    "max_token_age": 1,
    "group_timeout_seconds": 9.0,
    "trace": True,
}


@pytest.mark.parametrize("key", UNBUILT)
def test_what_is_not_built_is_refused_in_one_sentence(key: str) -> None:
    (message,) = refuse_unbuilt(AsyncTrainingConfig.model_validate({key: OTHER_VALUES[key]}))
    assert message.startswith(f"{S}.{key}={OTHER_VALUES[key]} is refused: ")
    assert message.count(". ") == 0
    with pytest.raises(ConfigError) as caught:
        load_run_config([*sound_run(), f"{S}.{key}={OTHER_VALUES[key]}"])
    assert str(caught.value) == message


def test_a_whole_recipe_is_refused_in_one_sentence() -> None:
    given = AsyncTrainingConfig(partial_rollout=False, kv_cache_on_update="keep", deterministic_steps=4)
    (message,) = refuse_unbuilt(given)
    assert message.startswith(f"{S}.kv_cache_on_update=keep, {S}.deterministic_steps=4 are refused: ")


NOT_AHEAD = [
    (f"{S}.staleness_threshold=1", "responses that weights change under", f"pass {S}.partial_rollout=False"),
    (f"{S}.staleness_threshold=1 {S}.partial_rollout=False {S}.order=ready", "order of completion", "pass order=admitted"),
    (f"{WHOLE} algorithm.filter_groups.enable=True", "algorithm.filter_groups.enable=True with", "staleness_threshold=0"),
    (f"{WHOLE} algorithm.adv_estimator=remax", "algorithm.adv_estimator=remax with", "staleness_threshold=0"),
    (f"{WHOLE} {TOOLS}", "multi_turn.enable=True with", "staleness_threshold=0"),
]


@pytest.mark.parametrize(("overrides", "must", "write"), NOT_AHEAD, ids=[row[0] for row in NOT_AHEAD])
def test_what_cannot_be_ahead_of_training_yet_is_refused_in_one_sentence(overrides: str, must: str, write: str) -> None:
    given = f"{overrides} {OWN_DEVICES} {CHOSEN}".split()
    arguments = [*sound_run(without={one.partition("=")[0] for one in given}), *given]
    with pytest.raises(ConfigError) as caught:
        load_run_config(arguments)
    message = str(caught.value)
    assert must in message
    assert write in message
    assert message.count(". ") == 0


@pytest.mark.parametrize("given", ["", f"{S}.order=admitted", f"{S}.max_off_policy_threshold=1"])
def test_one_step_off_is_accepted(given: str) -> None:
    overrides = f"{WHOLE} {given} {OWN_DEVICES} {CHOSEN}".split()
    config = load_run_config([*sound_run(without={one.partition("=")[0] for one in overrides}), *overrides])
    assert config.async_training.oldest == 1


def test_every_key_acts_or_is_refused() -> None:
    """``require_batches`` sets the size of a step, ``staleness_threshold`` how far generation is ahead; of the others only what
    whole responses in the order of admission mean is accepted."""
    acts = {"require_batches", "partial_rollout", "staleness_threshold", "max_off_policy_threshold", "order"}
    assert set(AsyncTrainingConfig.model_fields) - set(UNBUILT) == acts


@pytest.mark.parametrize("given", ["", "data.train_batch_size=0", "data.train_batch_size=48"])
def test_a_step_may_be_given_in_mini_batches(given: str) -> None:
    arguments = [*sound_run(without={"data.train_batch_size"}), f"{S}.require_batches=3", *given.split()]
    assert load_run_config(arguments).data.train_batch_size == 48
