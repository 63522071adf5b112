"""Translating verl's keys and values to this schema: moved keys, renamed values, keys that repeat another
one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_rc.config.errors import ConfigError, shortened
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import default_at, leaves_of, set_value, value_at
from verl_rc.config.verl import environments
from verl_rc.config.verl.refused import REFUSED_VALUES, RENAMED, refusal_of
from verl_rc.config.verl.refused_leaves import Refusal

_MODE, _V1 = "trainer.v1.trainer_mode", "trainer.v1.separate_async"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_ROLLOUT = "actor_rollout_ref.rollout"
_GROUPER = "actor_rollout_ref.actor.use_prefix_grouper"
_PADDING = "actor_rollout_ref.model.use_remove_padding"
_PROFILER = "global_profiler"
_JUDGE = "reward.reward_model"
_LENGTHS = (f"{_JUDGE}.rollout.prompt_length", f"{_JUDGE}.rollout.response_length")
_VERLS_LENGTH = 2048
"""The value of each of them that was not given, in verl."""
_PROFILED = {
    "actor_rollout_ref.actor.profiler": "ranks",
    "actor_rollout_ref.ref.profiler": "ranks",
    "critic.profiler": "ranks",
    "actor_rollout_ref.rollout.profiler": "engines",
}
"""verl's sections that choose who is profiled, and what stands for them below ``global_profiler``."""
_VERLS_DEFAULTS = {
    f"{_V1}.num_warmup_batches": 1,
    f"{_V1}.parameter_sync_step": 4,
    "trainer.v1.sampler.max_off_policy_threshold": 8,
    "trainer.v1.sampler.max_off_policy_strategy": "drop",
}
"""The values of these keys that ``trainer_mode=separate_async`` implies in verl."""
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
    "async_training.concurrent_samples_per_replica": "`async_training.max_concurrent_rollouts`, that number "
    "× `rollout.n`",
    "async_training.use_rollout_log_probs": f"`{_BYPASS}`",
    "actor_rollout_ref.actor.use_rollout_log_probs": f"`{_BYPASS}`",
    "data.gen_batch_size": "nothing, where it is 1 beside `async_training.*`",
    "actor_rollout_ref.actor.profiler.ranks": "`global_profiler.ranks`, with those of `ref` and `critic`",
    "actor_rollout_ref.rollout.profiler.ranks": "`global_profiler.engines`",
    **dict.fromkeys(_LENGTHS, f"`{_JUDGE}.max_length`, their sum; verl's default of each is {_VERLS_LENGTH}"),
    _PADDING: f"nothing, where it is False beside `{_GROUPER}=True`, which here needs packed rows",
}
"""verl's keys and what stands for them here, for the documents."""

Translated = tuple[str, Any] | None
"""The key here and its value. None if verl's value asks for what happens anyway."""


def with_verls_defaults(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The given leaves, with what verl takes for keys that were not given: beside ``separate_async``, and
    beside files of tools. Raises ``ConfigError`` where those contradict others."""
    leaves = environments.with_environment(leaves)
    if not _is_separate(leaves):
        return leaves
    return {**leaves, **{key: value for key, value in _VERLS_DEFAULTS.items() if key not in leaves}}


def translate(key: str, value: Any, leaves: Mapping[str, Any]) -> tuple[bool, Translated]:
    """Whether this key of verl with this value depends on others, and its translation beside all
    ``leaves``."""
    is_environment_key, translation = environments.translate(key, value, leaves)
    if is_environment_key:
        return True, translation
    if (
        key == "data.gen_batch_size"
        and value == 1
        and any(name.startswith("async_training.") for name in leaves)
    ):
        return True, None  # prompts are drawn one by one as they are admitted
    if key in _TRANSLATIONS and not (key == _MODE and not _is_separate(leaves)):
        return True, _TRANSLATIONS[key](value, leaves)
    return False, None


def _is_separate(leaves: Mapping[str, Any]) -> bool:
    return leaves.get(_MODE) == "separate_async"


def _async_key(key: str) -> Callable[[Any, Mapping[str, Any]], Translated]:
    return lambda value, leaves: (_OWN_NAMES[key], value) if _is_separate(leaves) else None


def _steps(value: Any, leaves: Mapping[str, Any]) -> Translated:
    """``rollout.total_rollout_steps`` counts prompts."""
    return ("trainer.total_training_steps", value // _batch(leaves)) if isinstance(value, int) else None


def _validations(value: Any, leaves: Mapping[str, Any]) -> Translated:
    """``rollout.test_freq`` counts publications."""
    interval = _value(leaves, "async_training.trigger_parameter_sync_step")
    counts = isinstance(value, int) and isinstance(interval, int) and value > 0
    return "trainer.test_freq", value * interval if counts else value


def _concurrent(value: Any, leaves: Mapping[str, Any]) -> Translated:
    """``async_training.concurrent_samples_per_replica`` counts prompts, each with all its samples."""
    samples = leaves.get("rollout.n", _value(leaves, f"{_ROLLOUT}.n"))
    requests = value * samples if isinstance(value, int) and isinstance(samples, int) else value
    # where nothing is waited for an engine decodes what it works on, and never more than that
    waits = ("multi_turn.enable", "environment.name")
    decoded = (
        None
        if any(_value(leaves, f"{_ROLLOUT}.{key}") for key in waits)
        else _value(leaves, f"{_ROLLOUT}.max_num_seqs")
    )
    happens_anyway = isinstance(requests, int) and isinstance(decoded, int) and requests >= decoded
    return None if happens_anyway else ("async_training.max_concurrent_rollouts", requests)


def _bypass(value: Any, _: Mapping[str, Any]) -> Translated:
    return (_BYPASS, True) if value is True else None


def _padding(value: Any, leaves: Mapping[str, Any]) -> Translated:
    return None if value is False and leaves.get(_GROUPER) is True else (_PADDING, value)


def _conversation(value: Any, leaves: Mapping[str, Any]) -> Translated:
    """Prompt and response are one conversation."""
    if leaves.get(f"{_JUDGE}.enable") is not True:
        return None
    lengths = [leaves.get(key, _VERLS_LENGTH) for key in _LENGTHS]
    return f"{_JUDGE}.max_length", sum(lengths) if all(isinstance(n, int) for n in lengths) else value


def _profiled(section: str) -> Callable[[Any, Mapping[str, Any]], Translated]:
    """``<section>.enable``, ``.all_ranks`` and ``.ranks``: the places of all sections that are enabled."""

    def translate_places(_: Any, leaves: Mapping[str, Any]) -> Translated:
        if leaves.get(f"{_PROFILER}.tool") != "torch" or leaves.get(f"{section}.enable") is not True:
            return None
        alike = [
            name
            for name, places in _PROFILED.items()
            if places == _PROFILED[section] and leaves.get(f"{name}.enable") is True
        ]
        if any(leaves.get(f"{name}.all_ranks") is True for name in alike):
            return f"{_PROFILER}.{_PROFILED[section]}", "all"
        ranks = {rank for name in alike for rank in leaves.get(f"{name}.ranks") or ()}
        return f"{_PROFILER}.{_PROFILED[section]}", sorted(ranks)

    return translate_places


def _batch(leaves: Mapping[str, Any]) -> int:
    mini_batches = leaves.get("async_training.require_batches")
    if mini_batches is None:
        return max(int(_value(leaves, "data.train_batch_size")), 1)
    return max(int(mini_batches * _value(leaves, "actor_rollout_ref.actor.ppo_mini_batch_size")), 1)


def _value(leaves: Mapping[str, Any], key: str) -> Any:
    return leaves.get(key, default_at(RunConfig, key))


_TRANSLATIONS: dict[str, Callable[[Any, Mapping[str, Any]], Translated]] = {
    **{key: _async_key(key) for key in _OWN_NAMES},
    _MODE: lambda *_: None,
    "rollout.total_rollout_steps": _steps,
    "rollout.test_freq": _validations,
    "async_training.concurrent_samples_per_replica": _concurrent,
    "async_training.use_rollout_log_probs": _bypass,
    "actor_rollout_ref.actor.use_rollout_log_probs": _bypass,
    **{
        f"{section}.{leaf}": _profiled(section)
        for section in _PROFILED
        for leaf in ("enable", "all_ranks", "ranks")
    },
    **dict.fromkeys(_LENGTHS, _conversation),
    **dict.fromkeys((_PADDING, "actor_rollout_ref.actor.use_remove_padding"), _padding),
}


MOVED = {
    "distillation.teacher_model": "distillation.teacher_models.teacher_model",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.policy_loss.tau_pos": "actor_rollout_ref.actor.tau_pos",
    "actor_rollout_ref.actor.policy_loss.tau_neg": "actor_rollout_ref.actor.tau_neg",
    "actor_rollout_ref.actor.use_remove_padding": _PADDING,
    _GROUPER: "actor_rollout_ref.model.share_prefixes",
    "actor_rollout_ref.ref.model.path": "actor_rollout_ref.ref.model_path",
    **{
        f"{role}.ulysses_sequence_parallel_size": f"{role}.fsdp_config.ulysses_sequence_parallel_size"
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    },
    "reward.timeout": "reward.timeout_seconds",
    f"{_JUDGE}.rollout.dtype": f"{_JUDGE}.dtype",
    "critic.fsdp": "critic.fsdp_config",
    "critic.model.fsdp_config": "critic.fsdp_config",
    "rollout.n": "actor_rollout_ref.rollout.n",
    "rollout.nnodes": "actor_rollout_ref.rollout.nnodes",
    "rollout.n_gpus_per_node": "actor_rollout_ref.rollout.n_gpus_per_node",
    "rollout.total_epochs": "trainer.total_epochs",
}
"""Keys and sections of verl and their names in this schema; also keys that verl itself no longer reads."""

VALUE_NAMES: dict[tuple[str, Any], Any] = {
    ("actor_rollout_ref.rollout.nnodes", 0): None,
    ("actor_rollout_ref.rollout.checkpoint_engine.backend", "naive"): "auto",
    ("actor_rollout_ref.rollout.checkpoint_engine.backend", "nccl"): "broadcast",
    ("algorithm.filter_groups.max_num_gen_batches", -1): 0,
}
"""Values that have another name in verl: (key of this schema, verl's value) to the value here."""


@dataclass(frozen=True)
class Agreement:
    """A key of verl whose value follows from other keys here: it is accepted when it agrees with them."""

    holds: Callable[[RunConfig, Any], bool]
    instead: str
    """An agreement with the value of one other key."""


def _equal(read: Callable[[RunConfig], Any], source: str) -> Agreement:
    return Agreement(
        lambda config, value: value is None or value == read(config), f"it always equals {source}; write that"
    )


def _environment_argument(name: str) -> Callable[[RunConfig], Any]:
    return lambda config: value_at(config.actor_rollout_ref.rollout.environment.arguments, name)


_SAMPLES = _equal(lambda config: config.actor_rollout_ref.rollout.n, "actor_rollout_ref.rollout.n")

AGREEMENTS = {
    "actor_rollout_ref.actor.checkpoint.save_lora_only": Agreement(
        lambda config, value: value in (None, config.actor_rollout_ref.model.lora_rank > 0),
        "a checkpoint has the adapters alone where there are any, and otherwise the whole model; drop it",
    ),
    "actor_rollout_ref.actor.rollout_n": _SAMPLES,
    "actor_rollout_ref.ref.rollout_n": _SAMPLES,
    "critic.rollout_n": _SAMPLES,
    "actor_rollout_ref.rollout.prompt_length": _equal(
        lambda config: config.data.max_prompt_length, "data.max_prompt_length"
    ),
    "critic.checkpoint.async_save": _equal(
        lambda config: config.actor_rollout_ref.actor.checkpoint.async_save,
        "actor_rollout_ref.actor.checkpoint.async_save",
    ),
    "critic.model.use_remove_padding": Agreement(
        lambda config, value: (
            value in (None, config.actor_rollout_ref.model.use_remove_padding)
            or config.actor_rollout_ref.model.share_prefixes is True  # verl's grouper wants False of both
        ),
        f"it always equals {_PADDING}; write that",
    ),
    **dict.fromkeys(
        ("actor_rollout_ref.rollout.response_length", "reward.reward_kwargs.max_resp_len"),
        _equal(lambda config: config.data.max_response_length, "data.max_response_length"),
    ),
    **{
        f"data.{name}": _equal(_environment_argument(name), f"{_ROLLOUT}.multi_turn.{name}")
        for name in ("tool_config_path", "function_tool_path")
    },
    "actor_rollout_ref.actor.router_replay.mode": Agreement(
        lambda config, mode: (
            (mode or "disabled")
            == ("R3" if config.actor_rollout_ref.rollout.enable_rollout_routing_replay else "disabled")
        ),
        "the actor takes the experts that the engine took, or its own in every pass; write R3 with "
        f"{_ROLLOUT}.enable_rollout_routing_replay=True, or disabled without it",
    ),
    "trainer.max_critic_ckpt_to_keep": _equal(
        lambda config: config.trainer.max_actor_ckpt_to_keep,
        "trainer.max_actor_ckpt_to_keep: both models lie in one checkpoint",
    ),
    "actor_rollout_ref.rollout.agent.default_agent_loop": Agreement(
        lambda config, name: (
            name
            in (
                (None, "tool_agent")
                if config.actor_rollout_ref.rollout.multi_turn.enable
                else (None, "single_turn_agent")
            )
        ),
        "there is one loop; write actor_rollout_ref.rollout.multi_turn.enable=True for tool_agent, False for "
        "single_turn_agent",
    ),
    "reward.reward_manager.name": Agreement(
        lambda config, name: (
            name in (None, "dapo")
            or (
                name in ("naive", "rate_limited")
                and not config.reward.reward_kwargs.overlong_buffer_cfg.enable
            )
            or (name == "gdpo" and config.algorithm.adv_estimator == "gdpo")
        ),
        "scores come from one place; write dapo (with reward.reward_kwargs.overlong_buffer_cfg), naive "
        "or rate_limited (without it), gdpo (with algorithm.adv_estimator=gdpo), or drop it",
    ),
}
"""Keys of verl that must agree with the rest of the configuration."""


@dataclass(frozen=True)
class TranslatedTree:
    """A tree of this schema's keys, and verl's keys that must agree with the whole configuration."""

    tree: dict[str, Any]
    demands: list[tuple[str, Any]]
    """Keys of ``AGREEMENTS`` and their given values."""

    def check(self, config: RunConfig) -> None:
        """Raise ``ConfigError`` naming every given key that the configuration contradicts."""
        problems = [
            refused_for([shortened(f"{key}={value}")], AGREEMENTS[key].instead)
            for key, value in self.demands
            if not AGREEMENTS[key].holds(config, value)
        ]
        if problems:
            raise ConfigError("\n".join(problems))


@dataclass(frozen=True)
class TranslatedKey:
    """The translation of one given key."""

    key: str
    """The key of this schema."""
    value: Any
    """The value in this schema."""
    problem: str | None = None
    """The reason for refusing the key, with what to write instead. None for a key that is accepted."""
    accepted: bool = False
    """Whether the key is dropped because its value is this project's behaviour anyway."""


def refused_for(pairs: Sequence[str], reason: str) -> str:
    """The message about ``key=value`` pairs that are refused for one reason."""
    return f"{', '.join(pairs)} {'is' if len(pairs) == 1 else 'are'} refused: {reason}."


def is_verl_key(key: str) -> bool:
    """Whether ``key`` is one of verl's that ``translate_tree`` knows, or lies below one."""
    by_table = key in AGREEMENTS or key in _TRANSLATIONS or key in environments.WRITTEN_HERE
    return moved(key) != key or by_table or refusal_of(key) is not None


def moved(key: str, names: Mapping[str, str] = MOVED) -> str:
    """The new name of ``key`` according to ``names`` of keys and sections; the key itself unless it moved."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        target = names.get(".".join(parts[:length]))
        if target is not None:
            return ".".join([target, *parts[length:]])
    return key


def translate_key(verl_key: str, verl_value: Any, leaves: Mapping[str, Any]) -> TranslatedKey:
    """Translate one key and its value; ``leaves`` holds all given values by their dotted keys."""
    is_async, translation = translate(verl_key, verl_value, leaves)
    if is_async:
        return (
            TranslatedKey(verl_key, verl_value, accepted=True)
            if translation is None
            else TranslatedKey(*translation)
        )
    key = moved(verl_key)
    value = verl_value
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        value = VALUE_NAMES.get((key, value), value)
    if isinstance(value, str) and (key, value) in REFUSED_VALUES:
        return TranslatedKey(key, value, problem=REFUSED_VALUES[key, value])
    section_and_refusal = None if key in AGREEMENTS else refusal_of(key)
    if section_and_refusal is None:
        return TranslatedKey(key, value, accepted=key != verl_key and value is None)
    section, refusal = section_and_refusal
    if _equals_any(value, refusal.accepted) or not _is_on(section, refusal, key, leaves):
        return TranslatedKey(key, value, accepted=True)
    renamed = moved(key, RENAMED)
    return TranslatedKey(
        key, value, problem=refusal.reason if renamed == key else f"{refusal.reason}: write {renamed}={value}"
    )


def _is_on(section: str, refusal: Refusal, key: str, leaves: Mapping[str, Any]) -> bool:
    """Whether the section of ``key`` is enabled; a section without a switch always is."""
    if refusal.switch is None:
        return True
    if "." in refusal.switch:
        return not _equals_any(leaves.get(refusal.switch), (False, None))
    switch = f"{section}.{refusal.switch}"
    return key == switch or not _equals_any(leaves.get(switch), (*refusal.accepted, False, None))


def _equals_any(value: Any, accepted: Sequence[Any]) -> bool:
    return any(type(value) is type(candidate) and value == candidate for candidate in accepted)


def translate_tree(source: Mapping[str, Any]) -> TranslatedTree:
    """Translate a tree of given values to this schema's keys: moved keys are renamed, accepted defaults are
    dropped.

    Raises ``ConfigError`` naming every key and value that is refused.
    """
    leaves = with_verls_defaults(dict(leaves_of(source)))
    tree: dict[str, Any] = {}
    demands: list[tuple[str, Any]] = []
    refused: dict[str, list[str]] = {}
    duplicates: list[str] = []
    for key, value in leaves.items():
        leaf = translate_key(key, value, leaves)
        if leaf.problem is not None:
            refused.setdefault(leaf.problem, []).append(shortened(f"{key}={value}"))
        elif leaf.key in AGREEMENTS:
            demands.append((leaf.key, leaf.value))
        elif leaf.key != key and leaves.get(leaf.key, leaf.value) != leaf.value:
            duplicates.append(
                f"{key}={value} and {leaf.key}={leaves[leaf.key]} are one option; give it once."
            )
        elif not leaf.accepted:
            set_value(tree, leaf.key, leaf.value)
    problems = [refused_for(given_values, reason) for reason, given_values in refused.items()]
    if problems or duplicates:
        raise ConfigError("\n".join(problems + duplicates))
    return TranslatedTree(tree, demands)
