"""What must hold between ``async_training`` and the rest of the configuration."""

import math
from collections.abc import Iterator
from fractions import Fraction

from verl_rc.config.algorithms import POLICY_LOSSES
from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.config.run import RunConfig

_SECTION = "async_training"
_CORRECTION = "algorithm.rollout_correction"
_CHOICES = {
    "rollout_is",
    "rollout_rs",
    "rollout_token_veto_threshold",
    "rollout_opsm_threshold",
    "bypass_mode",
}
"""Fields of rollout correction. One of them is given where a correction was chosen; a preset gives
``rollout_is``."""

NEEDS_ASYNCHRONY = (
    "max_off_policy_threshold",
    "max_off_policy_strategy",
    "order",
    "kv_cache_on_update",
    "max_token_age",
    "group_timeout_seconds",
    "deterministic_steps",
    "max_concurrent_rollouts",
)
"""Fields that a synchronous run refuses unless they have their default."""


def check_async_training(config: RunConfig) -> Iterator[str]:
    """What does not fit together, one sentence each."""
    options = config.async_training
    yield from _batches(config)
    yield from _interpolation(config)
    yield from _staging(config)
    if options.is_synchronous:
        for key in NEEDS_ASYNCHRONY:
            if _differs(options, key):
                yield (
                    f"{_SECTION}.{key}={getattr(options, key)} has no effect in a synchronous run "
                    f"({_SECTION}.staleness_threshold=0 and trigger_parameter_sync_step=1); raise one of "
                    "these, or drop it."
                )
        return
    yield from _surroundings(config)
    yield from _fractions(options)
    yield from _order(options)
    yield from _hard_bound(options)
    yield from _token_age(config)
    yield from _partial_rollouts(options)
    if options.deterministic_steps is not None and config.actor_rollout_ref.rollout.multi_turn.enable:
        yield (
            f"{_SECTION}.deterministic_steps={options.deterministic_steps} needs samples that do not depend "
            "on time, but with actor_rollout_ref.rollout.multi_turn.enable=True they wait for tools; drop "
            "one of them."
        )


def _batches(config: RunConfig) -> Iterator[str]:
    count = config.async_training.require_batches
    if count is None:
        return
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if config.data.train_batch_size != count * mini:
        yield (
            f"{_SECTION}.require_batches={count} of actor_rollout_ref.actor.ppo_mini_batch_size={mini} "
            f"prompts make a step of {count * mini}, and "
            f"data.train_batch_size must be that; got {config.data.train_batch_size}. Pass one of them."
        )


def _surroundings(config: RunConfig) -> Iterator[str]:
    options, rollout = config.async_training, config.actor_rollout_ref.rollout
    ahead, every = f"{options.staleness_threshold:g}", options.trigger_parameter_sync_step
    if options.staleness_threshold > 0 and config.actor_rollout_ref.hybrid_engine:
        yield (
            f"{_SECTION}.staleness_threshold={ahead} needs engines that work while the trainer does, but "
            "with actor_rollout_ref.hybrid_engine=True they share its devices; pass "
            "actor_rollout_ref.hybrid_engine=False, or staleness_threshold=0."
        )
    if not _correction_is_chosen(config):
        yield (
            f"{_SECTION}.staleness_threshold={ahead} with trigger_parameter_sync_step={every} trains on "
            "tokens of older weights, which needs a rollout correction, but none was chosen; pass "
            f"{_CORRECTION}.preset=decoupled_token_is, or preset=disabled to train uncorrected."
        )
    if config.trainer.test_freq > 0 and config.trainer.test_freq % every:
        yield (
            f"trainer.test_freq must be a multiple of {_SECTION}.trigger_parameter_sync_step={every}, "
            f"because only a published version can be validated, got {config.trainer.test_freq}; for example "
            f"{-(-config.trainer.test_freq // every) * every}."
        )
    most = options.max_concurrent_rollouts
    if most is not None and most > rollout.max_num_seqs and not rollout.multi_turn.enable:
        yield (
            f"{_SECTION}.max_concurrent_rollouts must be at most "
            f"actor_rollout_ref.rollout.max_num_seqs={rollout.max_num_seqs}, which an engine works on at "
            f"once where no tools are waited for, got {most}; raise that, or drop it."
        )


def _correction_is_chosen(config: RunConfig) -> bool:
    """Whether a correction was chosen: by a preset (``disabled`` is one) or by a field that decides."""
    fields = config.algorithm.rollout_correction.model_fields_set
    return "rollout_correction" in config.algorithm.model_fields_set and (
        not fields or bool(fields & _CHOICES)
    )


def _fractions(options: AsyncTrainingConfig) -> Iterator[str]:
    every, in_order = options.trigger_parameter_sync_step, options.resolved_order == "admitted"
    if in_order and (every * options.staleness).denominator != 1:
        yield (
            f"{_SECTION}.staleness_threshold={options.staleness_threshold:g} with "
            f"trigger_parameter_sync_step={every} is {float(every * options.staleness):g} steps, and "
            "fractions of a step buy nothing in the order of admission, where a step waits for its last "
            f"group; pass {_whole_steps(options.staleness, every):g}, or {_SECTION}.order=ready."
        )
    if (
        options.max_off_policy_threshold is not None
        and not in_order
        and (every * options.hard_bound).denominator != 1
    ):
        yield (
            f"{_SECTION}.max_off_policy_threshold={options.max_off_policy_threshold:g} with "
            f"trigger_parameter_sync_step={every} is {float(every * options.hard_bound):g} steps, and a "
            "fraction of a step bounds nothing, because ages are whole steps; pass "
            f"{_whole_steps(options.hard_bound, every, up=True):g}, which means the same."
        )


def _order(options: AsyncTrainingConfig) -> Iterator[str]:
    k, every = options.staleness, options.trigger_parameter_sync_step
    if options.order == "ready" and not options.partial_rollout and every == 1 and k.denominator == 1:
        yield (
            f"{_SECTION}.order=ready has no effect with partial_rollout=False, "
            f"staleness_threshold={float(k):g} and a publication after every step: all that is older than "
            "the last publication has ended, so the oldest are the lowest numbers; pass order=admitted, or "
            "raise trigger_parameter_sync_step."
        )


def _hard_bound(options: AsyncTrainingConfig) -> Iterator[str]:
    threshold, key = options.max_off_policy_threshold, f"{_SECTION}.max_off_policy_threshold"
    ahead, in_order = (
        f"{_SECTION}.staleness_threshold={options.staleness_threshold:g}",
        options.resolved_order == "admitted",
    )
    if threshold is not None and threshold < options.staleness_threshold:
        yield (
            f"{key} must be at least {ahead}, how far generation may be ahead, got {threshold:g}; raise it, "
            "or lower that."
        )
    elif threshold and not in_order and options.staleness_threshold == 0:
        yield (
            f"{key}={threshold:g} has no effect without a lead ({ahead}): all that is admitted is trained on "
            "before the next publication; raise that, or drop it."
        )
    elif threshold and not in_order and not options.partial_rollout:
        yield (
            f"{key}={threshold:g} has no effect with {_SECTION}.partial_rollout=False, where all responses "
            f"end before the next publication and {ahead} is kept by itself; drop it."
        )
    elif threshold is not None and in_order and threshold != options.staleness_threshold:
        yield (
            f"{key}={threshold:g} has no effect in the order of admission, which keeps {ahead} by itself; "
            f"drop it, or pass {_SECTION}.order=ready."
        )
    if options.max_off_policy_strategy == "drop" and options.staleness == 0:
        yield (
            f"{_SECTION}.max_off_policy_strategy=drop has no effect without a lead ({ahead}): nothing grows "
            "too old; raise that, or drop it."
        )
    elif options.max_off_policy_strategy == "drop" and in_order:
        yield (
            f"{_SECTION}.max_off_policy_strategy=drop has no effect in the order of admission, in which "
            f"nothing grows older than {ahead}; drop it, or pass {_SECTION}.order=ready."
        )
    elif options.max_off_policy_strategy == "drop" and not options.partial_rollout:
        yield (
            f"{_SECTION}.max_off_policy_strategy=drop has no effect with {_SECTION}.partial_rollout=False, "
            "where all responses end before the next publication and nothing grows too old; drop it."
        )
    elif options.max_off_policy_strategy == "drop" and threshold is None:
        yield (
            f"{_SECTION}.max_off_policy_strategy=drop needs the bound beyond which groups are dropped: pass "
            f"{key}=<publications>, at least {options.staleness_threshold:g}; none was given."
        )


def _token_age(config: RunConfig) -> Iterator[str]:
    options = config.async_training
    if options.max_token_age is None:
        return
    setting, usual = f"{_SECTION}.max_token_age={options.max_token_age}", options.usual_age
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
    if correction.in_actor:
        mode = "bypass_mode=True" if correction.bypass_mode else "proximal=interpolate"
        yield (
            f"{setting} is a rule of the driver, and with {_CORRECTION}.{mode} the actor decides which "
            "tokens it keeps; drop one of them."
        )


def _partial_rollouts(options: AsyncTrainingConfig) -> Iterator[str]:
    if options.deterministic_steps is not None and options.kv_cache_on_update == "keep":
        yield (
            f"{_SECTION}.deterministic_steps={options.deterministic_steps} needs responses that a resumed "
            f"run continues alike, but with {_SECTION}.kv_cache_on_update=keep they depend on a cache that "
            "no checkpoint holds; drop one of them."
        )
    if options.deterministic_steps is not None and options.order == "ready":
        yield (
            f"{_SECTION}.deterministic_steps={options.deterministic_steps} needs batches that do not depend "
            f"on time, but {_SECTION}.order=ready was given; pass order=admitted, or drop one of them."
        )
    if options.cuts:
        return
    cause = (
        "partial_rollout=False"
        if not options.partial_rollout
        else f"staleness_threshold={options.staleness_threshold:g}"
    )
    for key in ("deterministic_steps", "kv_cache_on_update"):
        if _differs(options, key):
            yield (
                f"{_SECTION}.{key}={getattr(options, key)} has no effect with {_SECTION}.{cause}, where "
                "weights never change under a response; drop one of them."
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
            f"{_SECTION}.staleness_threshold."
        )
    if spec is not None and spec.selects_by_covariance:
        yield (
            f"{key} cannot go with loss_mode={loss}, which orders tokens before the loss; pass "
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
            f"{_SECTION}.staleness_threshold=1 and engines with devices of their own, or drop it."
        )
    if rollout.tensor_model_parallel_size > 1:
        yield (
            f"{key} needs engines of one device, because workers in other processes receive nothing beside "
            "their steps, got "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}; "
            "drop one of them."
        )


def _whole_steps(publications: Fraction, every: int, up: bool = False) -> float:
    """``publications`` rounded so that they are whole steps."""
    steps = every * publications
    return float(Fraction(math.ceil(steps) if up else math.floor(steps), every))


def _differs(options: AsyncTrainingConfig, key: str) -> bool:
    return bool(getattr(options, key) != type(options).model_fields[key].default)
