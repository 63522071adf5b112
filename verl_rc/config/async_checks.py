"""What must hold between ``async_training`` and the rest of the configuration."""

import math
from collections.abc import Iterator
from fractions import Fraction

from verl_rc.config.algorithms import POLICY_LOSSES
from verl_rc.config.async_training import SECTION, AsyncTrainingConfig, unread_keys
from verl_rc.config.run import RunConfig

_CORRECTION = "algorithm.rollout_correction"
_CHOICES = {
    "rollout_is",
    "rollout_rs",
    "rollout_token_veto_threshold",
    "rollout_opsm_threshold",
    "bypass_mode",
}
"""Fields of rollout correction that choose a correction when one of them is given; a preset gives
``rollout_is``."""


def check_async_training(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each contradiction."""
    options = config.async_training
    yield from _batches(config)
    yield from _interpolation(config)
    yield from _staging(config)
    for keys, reason, remedy in unread_keys(options):
        for key in keys if remedy else ():
            value = getattr(options, key)
            repeats_lead = key == "max_off_policy_threshold" and value == options.staleness_threshold
            if value != AsyncTrainingConfig.model_fields[key].default and not repeats_lead:
                yield f"{SECTION}.{key}={value} has no effect {reason}; {remedy}."
    if options.is_synchronous:
        return
    yield from _surroundings(config)
    yield from _fractions(options)
    yield from _hard_bound(options)
    yield from _token_age(config)
    yield from _partial_rollouts(options)


def _batches(config: RunConfig) -> Iterator[str]:
    count, mini = config.async_training.require_batches, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if count is not None and config.data.train_batch_size != count * mini:
        yield (
            f"{SECTION}.require_batches={count} of actor_rollout_ref.actor.ppo_mini_batch_size={mini} "
            f"prompts make a step of {count * mini}, and "
            f"data.train_batch_size must be that; got {config.data.train_batch_size}. Pass one of them."
        )


def _surroundings(config: RunConfig) -> Iterator[str]:
    options, rollout = config.async_training, config.actor_rollout_ref.rollout
    ahead, interval = f"{options.staleness_threshold:g}", options.trigger_parameter_sync_step
    if options.staleness_threshold > 0 and config.actor_rollout_ref.hybrid_engine:
        yield (
            f"{SECTION}.staleness_threshold={ahead} needs engines that work while the trainer does, but "
            "with actor_rollout_ref.hybrid_engine=True they share its devices; pass "
            "actor_rollout_ref.hybrid_engine=False, or staleness_threshold=0."
        )
    if not _correction_is_chosen(config):
        yield (
            f"{SECTION}.staleness_threshold={ahead} with trigger_parameter_sync_step={interval} trains on "
            "tokens of older weights, which needs a rollout correction, but none was chosen; pass "
            f"{_CORRECTION}.preset=decoupled_token_is, or preset=disabled to train uncorrected."
        )
    if config.trainer.test_freq > 0 and config.trainer.test_freq % interval:
        yield (
            f"trainer.test_freq must be a multiple of {SECTION}.trigger_parameter_sync_step={interval}, "
            f"because only a published version can be validated, got {config.trainer.test_freq}; for example "
            f"{-(-config.trainer.test_freq // interval) * interval}."
        )
    most = options.max_concurrent_rollouts
    if most is not None and most > rollout.max_num_seqs and not rollout.converses:
        yield (
            f"{SECTION}.max_concurrent_rollouts must be at most "
            f"actor_rollout_ref.rollout.max_num_seqs={rollout.max_num_seqs}, which an engine works on at "
            f"once where nothing is waited for, got {most}; raise that, or drop it."
        )


def _correction_is_chosen(config: RunConfig) -> bool:
    """Whether a correction was chosen: by a preset (``disabled`` is one) or by a field that decides."""
    fields = config.algorithm.rollout_correction.model_fields_set
    return "rollout_correction" in config.algorithm.model_fields_set and (
        not fields or bool(fields & _CHOICES)
    )


def _fractions(options: AsyncTrainingConfig) -> Iterator[str]:
    interval, in_order = options.trigger_parameter_sync_step, options.resolved_order == "admitted"
    if in_order and (interval * options.staleness).denominator != 1:
        yield (
            f"{SECTION}.staleness_threshold={options.staleness_threshold:g} with "
            f"trigger_parameter_sync_step={interval} is {float(interval * options.staleness):g} steps, and "
            "fractions of a step buy nothing in the order of admission, where a step waits for its last "
            f"group; pass {_whole_steps(options.staleness, interval):g}, or {SECTION}.order=ready."
        )
    if (
        options.max_off_policy_threshold is not None
        and not in_order
        and (interval * options.hard_bound).denominator != 1
    ):
        yield (
            f"{SECTION}.max_off_policy_threshold={options.max_off_policy_threshold:g} with "
            f"trigger_parameter_sync_step={interval} is {float(interval * options.hard_bound):g} steps, and "
            "a fraction of a step bounds nothing, because ages are whole steps; pass "
            f"{_whole_steps(options.hard_bound, interval, up=True):g}, which means the same."
        )


def _hard_bound(options: AsyncTrainingConfig) -> Iterator[str]:
    threshold, key = options.max_off_policy_threshold, f"{SECTION}.max_off_policy_threshold"
    if threshold is not None and threshold < options.staleness_threshold:
        yield (
            f"{key} must be at least {SECTION}.staleness_threshold={options.staleness_threshold:g}, how far "
            f"generation may be ahead, got {threshold:g}; raise it, or lower that."
        )
    if options.max_off_policy_strategy == "drop" and threshold is None and not options.keeps_ages:
        yield (
            f"{SECTION}.max_off_policy_strategy=drop needs the bound beyond which groups are dropped: pass "
            f"{key}=<publications>, at least {options.staleness_threshold:g}; none was given."
        )


def _token_age(config: RunConfig) -> Iterator[str]:
    options = config.async_training
    if options.max_token_age is None:
        return
    setting, usual = f"{SECTION}.max_token_age={options.max_token_age}", options.usual_age
    if options.max_token_age >= options.oldest:
        yield (
            f"{setting} is never passed: no token is older than {options.oldest} steps; pass at most "
            f"{options.oldest - 1}, or drop it."
        )
    elif not options.partial_rollout and options.max_token_age < usual:
        yield (
            f"{setting} rejects all tokens once the run is {usual} steps ahead: with partial_rollout=False "
            f"those of a step are {usual} to {options.oldest} steps old; pass {usual} or more, lower "
            "staleness_threshold, or drop it."
        )
    correction = config.algorithm.rollout_correction
    if correction.mode != "decoupled":
        mode = "bypass_mode=True" if correction.mode == "bypass" else "proximal=interpolate"
        yield (
            f"{setting} is a rule of the driver, and with {_CORRECTION}.{mode} the actor decides which "
            "tokens it keeps; drop one of them."
        )


def _partial_rollouts(options: AsyncTrainingConfig) -> Iterator[str]:
    if options.deterministic_steps is not None and options.kv_cache_on_update == "keep":
        yield (
            f"{SECTION}.deterministic_steps={options.deterministic_steps} needs responses that a resumed "
            f"run continues alike, but with {SECTION}.kv_cache_on_update=keep they depend on a cache that "
            "no checkpoint holds; drop one of them."
        )
    if options.deterministic_steps is not None and options.order == "ready":
        yield (
            f"{SECTION}.deterministic_steps={options.deterministic_steps} needs batches that do not depend "
            f"on time, but {SECTION}.order=ready was given; pass order=admitted, or drop one of them."
        )


def _interpolation(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if algorithm.rollout_correction.proximal != "interpolate":
        return
    key, spec = f"{_CORRECTION}.proximal=interpolate", POLICY_LOSSES.get(loss)
    if config.async_training.is_synchronous:
        yield (
            f"{key} interpolates by the age of tokens, which is 0 in a synchronous run: nothing would be "
            "corrected after the first update; pass proximal=recompute, or raise "
            f"{SECTION}.staleness_threshold."
        )
    if spec is not None and spec.reads_mini_batch:
        yield (
            f"{key} cannot go with loss_mode={loss}, which looks at the whole mini-batch first; pass "
            "proximal=recompute."
        )
    if algorithm.use_kl_in_reward:
        yield (
            f"{key} computes no proximal policy before the update, and algorithm.use_kl_in_reward=True "
            "compares it with the reference policy; pass proximal=recompute, or "
            "actor_rollout_ref.actor.use_kl_loss=True instead."
        )


def _staging(config: RunConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if not rollout.checkpoint_engine.stage_updates:
        return
    key = "actor_rollout_ref.rollout.checkpoint_engine.stage_updates=True"
    if not config.overlaps:
        yield (
            f"{key} has no effect where nothing runs in the engines at a publication; pass "
            f"{SECTION}.staleness_threshold=1 and engines with devices of their own, or drop it."
        )
    if rollout.tensor_model_parallel_size > 1:
        yield (
            f"{key} needs engines of one device, because workers in other processes receive nothing beside "
            "their steps, got "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}; "
            "drop one of them."
        )


def _whole_steps(publications: Fraction, interval: int, up: bool = False) -> float:
    """``publications``, which are ``interval`` steps apart, rounded to whole steps."""
    steps = interval * publications
    return float(Fraction(math.ceil(steps) if up else math.floor(steps), interval))
