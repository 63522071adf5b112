"""verl's keys for asynchronous training, of its one-step-off, fully asynchronous and V1 recipes, in this schema's terms."""

from collections.abc import Callable, Mapping
from typing import Any

from verl_rc.config.run import RunConfig
from verl_rc.config.schema import default_at

_MODE, _V1 = "trainer.v1.trainer_mode", "trainer.v1.separate_async"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_ROLLOUT = "actor_rollout_ref.rollout"
_VERLS_DEFAULTS = {
    f"{_V1}.num_warmup_batches": 1,
    f"{_V1}.parameter_sync_step": 4,
    "trainer.v1.sampler.max_off_policy_threshold": 8,
    "trainer.v1.sampler.max_off_policy_strategy": "drop",
}
"""What ``trainer_mode=separate_async`` means in verl without these keys."""
_OWN_NAMES = {
    f"{_V1}.num_warmup_batches": "async_training.staleness_threshold",
    f"{_V1}.parameter_sync_step": "async_training.trigger_parameter_sync_step",
    "trainer.v1.sampler.max_off_policy_threshold": "async_training.max_off_policy_threshold",
    "trainer.v1.sampler.max_off_policy_strategy": "async_training.max_off_policy_strategy",
}

WRITTEN_HERE = {
    **{key: f"`{name}` beside `{_MODE}=separate_async`" for key, name in _OWN_NAMES.items()},
    "rollout.total_rollout_steps": "`trainer.total_training_steps`, that number / prompts of a step",
    "rollout.test_freq": "`trainer.test_freq`, that number × `async_training.trigger_parameter_sync_step`",
    "async_training.concurrent_samples_per_replica": "`async_training.max_concurrent_rollouts`, that number × `rollout.n`",
    "async_training.use_rollout_log_probs": f"`{_BYPASS}`",
    "actor_rollout_ref.actor.use_rollout_log_probs": f"`{_BYPASS}`",
    "data.gen_batch_size": "nothing, where it is 1 beside `async_training.*`",
}
"""verl's keys and what stands for them here, for the documents."""

Translated = tuple[str, Any] | None
"""The key that a value belongs to here, and what it is there; None: it says what happens anyway."""


def with_verls_async_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given leaves, with what verl's ``separate_async`` takes for those of its keys that were not given."""
    if not _is_separate(given):
        return dict(given)
    return {**given, **{key: value for key, value in _VERLS_DEFAULTS.items() if key not in given}}


def is_translated(key: str) -> bool:
    """Whether ``translate`` may have an answer."""
    return key in _TRANSLATIONS


def translate(key: str, value: Any, given: Mapping[str, Any]) -> tuple[bool, Translated]:
    """Whether a key of verl with this value is one of those here, and what it says beside all the ``given`` ones."""
    if key == "data.gen_batch_size" and value == 1 and any(name.startswith("async_training.") for name in given):
        return True, None  # prompts are drawn one by one as they are admitted
    if key in _TRANSLATIONS and not (key == _MODE and not _is_separate(given)):
        return True, _TRANSLATIONS[key](value, given)
    return False, None


def _is_separate(given: Mapping[str, Any]) -> bool:
    return given.get(_MODE) == "separate_async"


def _of_v1(key: str) -> Callable[[Any, Mapping[str, Any]], Translated]:
    return lambda value, given: (_OWN_NAMES[key], value) if _is_separate(given) else None


def _steps(value: Any, given: Mapping[str, Any]) -> Translated:
    """``rollout.total_rollout_steps`` counts prompts."""
    return ("trainer.total_training_steps", value // _batch(given)) if isinstance(value, int) else None


def _validations(value: Any, given: Mapping[str, Any]) -> Translated:
    """``rollout.test_freq`` counts publications."""
    every = _value(given, "async_training.trigger_parameter_sync_step")
    counts = isinstance(value, int) and isinstance(every, int) and value > 0
    return "trainer.test_freq", value * every if counts else value


def _concurrent(value: Any, given: Mapping[str, Any]) -> Translated:
    """``async_training.concurrent_samples_per_replica`` counts prompts, each with all its samples."""
    samples = given.get("rollout.n", _value(given, f"{_ROLLOUT}.n"))
    most = value * samples if isinstance(value, int) and isinstance(samples, int) else value
    # without tools an engine decodes what it works on, and never more than that
    decoded = None if _value(given, f"{_ROLLOUT}.multi_turn.enable") else _value(given, f"{_ROLLOUT}.max_num_seqs")
    happens_anyway = isinstance(most, int) and isinstance(decoded, int) and most >= decoded
    return None if happens_anyway else ("async_training.max_concurrent_rollouts", most)


def _bypass(value: Any, _: Mapping[str, Any]) -> Translated:
    return (_BYPASS, True) if value is True else None


def _batch(given: Mapping[str, Any]) -> int:
    mini_batches, mini = given.get("async_training.require_batches"), "actor_rollout_ref.actor.ppo_mini_batch_size"
    size = _value(given, "data.train_batch_size") if mini_batches is None else mini_batches * _value(given, mini)
    return max(int(size), 1)


def _value(given: Mapping[str, Any], key: str) -> Any:
    return given.get(key, default_at(RunConfig, key.split(".")))


_TRANSLATIONS: dict[str, Callable[[Any, Mapping[str, Any]], Translated]] = {
    **{key: _of_v1(key) for key in _OWN_NAMES},
    _MODE: lambda *_: None,
    "rollout.total_rollout_steps": _steps,
    "rollout.test_freq": _validations,
    "async_training.concurrent_samples_per_replica": _concurrent,
    "async_training.use_rollout_log_probs": _bypass,
    "actor_rollout_ref.actor.use_rollout_log_probs": _bypass,
}
