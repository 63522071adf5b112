"""Options without effect under a configuration, and warnings about probably unintended combinations."""

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from verl_rc.config.algorithms import LOSS_OPTIONS, EstimatorOption
from verl_rc.config.async_training import SECTION, unread_keys
from verl_rc.config.run import FOLLOWED_KEYS, RunConfig, fsdp_section
from verl_rc.config.schema import fields_of
from verl_rc.plan.run_plan.objective import AdvantagePlan, PolicyPlan
from verl_rc.plan.run_plan.schedule import BatchArithmetic
from verl_rc.plan.run_plan.switches import UnreadRule, unread_by_switches

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_CLIPS = ("clip_ratio_low", "clip_ratio_high")
_K1_KINDS = ("kl", "k1")
_ESTIMATOR_KEYS: Sequence[EstimatorOption] = ("gamma", "lam", "norm_adv_by_std_in_grpo", "turn_credit")

_NO_TASK = "use_task_rewards=False: the teacher alone is trained on"
_LOSS_KEYS = sorted(option.key for option in LOSS_OPTIONS if not option.is_required)


@dataclass(frozen=True)
class UnusedOption:
    """A key without effect on training."""

    key: str
    """A leaf, or a whole section as ``section.*``."""
    reason: str
    is_changed: bool
    """Whether the option was set to another value than its default, so that the user expects an effect."""
    metrics_only: bool = False
    """Whether the option affects metrics alone."""


def unused_options(
    config: RunConfig, policy: PolicyPlan, advantages: AdvantagePlan
) -> tuple[UnusedOption, ...]:
    """Every option without effect under ``config``, with its reason."""
    reasons = dict(_unread(config, policy, advantages))
    keys = [key for key in reasons if not _acts_through_another(config, key, reasons)]
    rows = [(key, reasons[key], False) for key in keys]
    rows += [(key, reason, True) for key, reason in _metrics_only(config)]
    return tuple(
        UnusedOption(key, reason, _is_changed(config, key), metrics_only)
        for key, reason, metrics_only in rows
        if not _covers(set(keys) - {key}, key)
    )


def _covers(patterns: Iterable[str], key: str) -> bool:
    """Whether ``key`` is one of ``patterns``, or in a section that they name."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _acts_through_another(config: RunConfig, key: str, unread: Iterable[str]) -> bool:
    """Whether a key with an effect takes its value from ``key``, which is unread itself."""
    followers = [follower for follower, followed in FOLLOWED_KEYS.items() if followed == key]
    return any(
        attrgetter(follower)(config) == attrgetter(key)(config) and not _covers(unread, follower)
        for follower in followers
    )


def _unread(config: RunConfig, policy: PolicyPlan, advantages: AdvantagePlan) -> Iterator[tuple[str, str]]:
    rules: dict[str, Iterable[UnreadRule]] = {
        f"{_ACTOR}.": _unused_by_the_loss(config, policy, advantages),
        "algorithm.": _unused_by_advantages(config, advantages),
        "": unread_by_switches(config),
        "distillation.": _unused_by_the_teacher(config, policy),
        f"{SECTION}.": ((True, keys, reason) for keys, reason, _ in unread_keys(config.async_training)),
    }
    for prefix, section_rules in rules.items():
        for is_unread, keys, reason in section_rules:
            if is_unread:
                yield from ((prefix + key, reason) for key in keys)


def _unused_by_the_loss(
    config: RunConfig, policy: PolicyPlan, advantages: AdvantagePlan
) -> Iterator[UnreadRule]:
    actor, spec = config.actor_rollout_ref.actor, policy.spec
    correction = config.algorithm.rollout_correction
    if not policy.has_task_loss:
        yield True, ["policy_loss.loss_mode", "clip_ratio", *_LOSS_KEYS], _NO_TASK
        spec = None
    has_own_clips = actor.clip_ratio not in (actor.clip_ratio_low, actor.clip_ratio_high)
    yield (
        policy.has_task_loss and correction.named_loss is not None,
        ("policy_loss.loss_mode",),
        f"{_CORRECTION}.loss_type={correction.loss_type} is the policy loss",
    )
    if spec is not None:
        # The loader refuses a required option where it is unread, so that none is left to be listed.
        unread = sorted(
            option.key for option in LOSS_OPTIONS if option not in spec.options and not option.is_required
        )
        yield True, unread, f"the loss {policy.loss} does not read it"
        yield (
            advantages.spec is not None and advantages.spec.never_negative,
            [option.key for option in spec.only_negative],
            f"the estimator {advantages.estimator} gives no negative advantage",
        )
        yield _CLIPS[0] in unread, ("clip_ratio",), f"the loss {policy.loss} does not read it"
        yield (
            _CLIPS[0] not in unread and has_own_clips,
            ("clip_ratio",),
            "clip_ratio_low and clip_ratio_high were given",
        )
    yield (
        policy.regulariser_aggregation not in policy.aggregations,
        ("loss_agg_mode",),
        f"the loss {policy.loss} has its own average, {policy.aggregation}",
    )
    yield (
        "seq-mean-token-sum-norm" not in policy.aggregations,
        ("loss_scale_factor",),
        "it belongs to loss_agg_mode=seq-mean-token-sum-norm",
    )
    yield policy.kl_loss_coef is None, ("kl_loss_coef", "kl_loss_type"), "use_kl_loss=False"


def _unused_by_advantages(config: RunConfig, advantages: AdvantagePlan) -> Iterator[UnreadRule]:
    algorithm = config.algorithm
    if not config.distillation.has_task_loss:
        yield True, _ESTIMATOR_KEYS, _NO_TASK
        yield True, ("use_kl_in_reward", "kl_penalty", "kl_ctrl.*"), _NO_TASK
        return
    yield (
        True,
        [key for key in _ESTIMATOR_KEYS if not advantages.reads(key)],
        f"the estimator {advantages.estimator} does not read it",
    )
    yield (
        advantages.reads("turn_credit") and not config.actor_rollout_ref.rollout.converses,
        ("turn_credit",),
        "samples have one turn",
    )
    yield not algorithm.use_kl_in_reward, ("kl_penalty", "kl_ctrl.*"), "use_kl_in_reward=False"
    yield (
        algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "fixed",
        ("kl_ctrl.target_kl", "kl_ctrl.horizon"),
        "kl_ctrl.type=fixed",
    )


def _unused_by_the_teacher(config: RunConfig, policy: PolicyPlan) -> Iterator[UnreadRule]:
    loss = config.distillation.loss
    if loss is None:
        yield True, ("teacher_models", "distillation_loss.*"), "distillation.enabled=False: no teacher"
        return
    section = "distillation_loss."
    yield not loss.use_task_rewards, (f"{section}distillation_loss_coef",), "there is no other term"
    yield (
        not config.distillation.top_tokens,
        (f"{section}topk", f"{section}log_prob_min_clamp"),
        f"they belong to {section}loss_mode=forward_kl_topk",
    )
    reads_clips = policy.teacher_loss == "vanilla"
    yield (
        not reads_clips,
        [section + clip for clip in ("clip_ratio", *_CLIPS)],
        "use_policy_gradient=False"
        if policy.teacher_loss is None
        else f"{_CORRECTION}.loss_type={policy.teacher_loss}",
    )
    yield (
        reads_clips and loss.clip_ratio not in (loss.clip_ratio_low, loss.clip_ratio_high),
        (f"{section}clip_ratio",),
        "clip_ratio_low and clip_ratio_high were given",
    )


def _metrics_only(config: RunConfig) -> Iterator[tuple[str, str]]:
    correction, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    if not correction.applies_weights:
        for key in (
            ("rollout_is",) if correction.rollout_is is None else ("rollout_is", "rollout_is_threshold")
        ):
            yield (
                f"{_CORRECTION}.{key}",
                "in bypass mode the ratio of the loss is itself current/rollout, so weights are reported and "
                "not applied",
            )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield (
            f"{_ACTOR}.use_kl_loss",
            "kl_loss_coef=0: the divergence is reported, for a forward pass of the reference policy",
        )
        yield f"{_ACTOR}.kl_loss_type", "kl_loss_coef=0"
    if not config.distillation.has_task_loss:
        return
    if config.algorithm.estimator_reads("component_scores"):
        penalty_keys = ("kl_penalty", "kl_ctrl.kl_coef") if config.algorithm.use_kl_in_reward else ()
        for key in ("use_kl_in_reward", *penalty_keys):
            yield (
                f"algorithm.{key}",
                f"the estimator {config.algorithm.adv_estimator} looks at the parts of the reward, which "
                "carry no penalty",
            )
    elif config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "algorithm.use_kl_in_reward",
            "kl_ctrl.kl_coef=0: the divergence is reported, for a forward pass of the reference",
        )
        yield "algorithm.kl_penalty", "kl_ctrl.kl_coef=0"


def warnings_of(config: RunConfig, policy: PolicyPlan, sizes: BatchArithmetic) -> Iterator[str]:
    """Warnings about allowed but probably unintended combinations, each with a remedy."""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    estimator = config.algorithm.estimator
    if config.actor_rollout_ref.rollout.n == 1 and estimator is not None and estimator.compares_groups:
        yield (
            f"actor_rollout_ref.rollout.n=1 gives algorithm.adv_estimator={config.algorithm.adv_estimator} "
            "nothing to compare a sample with: its advantage is made of its own score, without a baseline, "
            "as in verl. Raise rollout.n for advantages relative to other samples of the prompt."
        )
    if sizes.critic_only_steps and not config.needs_critic:
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup} leaves the actor alone for "
            f"{sizes.critic_only_steps} steps, and there is no critic to warm up: these steps train nothing. "
            "Drop it."
        )
    if trainer.total_training_steps is not None and trainer.critic_warmup > trainer.total_training_steps:
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup} is beyond the steps of the run "
            f"(trainer.total_training_steps={trainer.total_training_steps}): the actor is never updated. "
            "Lower it."
        )
    if policy.kl_loss_coef and actor.kl_loss_type in _K1_KINDS:
        yield (
            f"{_ACTOR}.kl_loss_type={actor.kl_loss_type} has a gradient that does not depend on the "
            "reference policy and is 0 in expectation: it holds nothing back. Pass low_var_kl, k2, or kl+ "
            "(its value, with the gradient of the divergence)."
        )
    for role, size in config.sequence_parallel_sizes.items():
        if trainer.n_gpus_per_node % size:
            yield (
                f"{fsdp_section(role)}.ulysses_sequence_parallel_size={size} does not divide "
                f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: ranks on different nodes share tokens, "
                "and every layer's attention waits for the network between them."
            )
    has_ratio = policy.has_task_loss or policy.teacher_loss is not None
    ratio = policy.spec.ratio if has_ratio and policy.spec is not None else None
    if sizes.actor.optimizer_steps == 1 and policy.mode != "bypass" and ratio in ("token", "row", "product"):
        yield (
            "one update per step: current and proximal policy are the same in it, so the ratio is 1 up to "
            "rounding and no clip or gate acts. For more updates per step lower "
            "actor_rollout_ref.actor.ppo_mini_batch_size or raise ppo_epochs; "
            f"{_CORRECTION}.bypass_mode=True with loss_type=reinforce gives the same gradient without the "
            "pass of old_log_prob."
        )
    if policy.mode == "bypass" and policy.applies_weights and sizes.actor.optimizer_steps > 1:
        yield (
            f"{sizes.actor.optimizer_steps} updates per step without a clip (loss_type=reinforce): only the "
            "weights' threshold bounds how far a step goes. A lower rollout_is_threshold, fewer updates, or "
            "loss_type=ppo_clip hold it back."
        )


def asynchrony_warnings(config: RunConfig) -> Iterator[str]:
    """Warnings about combinations of asynchronous training."""
    options, correction = config.async_training, config.algorithm.rollout_correction
    if options.is_synchronous:
        return
    if options.max_off_policy_strategy == "drop":
        yield (
            "async_training.max_off_policy_strategy=drop throws sampled tokens away, above all those of long "
            "responses: simulated on 128 devices with responses of at most 28k tokens and a bound of 1, 17 % "
            "of the tokens were wasted, and the responses trained on were 14 % too short. wait with a bound "
            "larger by 1 is as fast, and trains on all of them."
        )
    estimator = config.algorithm.estimator
    if options.trigger_parameter_sync_step > 1 and estimator is not None and estimator.whitens:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} whitens over the batch, which is that "
            f"of one step: {config.data.train_batch_size} prompts, not those of all "
            f"{options.trigger_parameter_sync_step} steps of a publication."
        )
    corrects = correction.rollout_is is not None or correction.rejects or correction.mode != "decoupled"
    if options.usual_age >= 1 and not (corrects or correction.score_centering.enabled):
        yield (
            f"{_CORRECTION} corrects nothing, and samples are {options.usual_age} or more steps old. Such "
            "runs lost accuracy from one step on, and broke at eight (docs/evidence.md). Pass "
            "correction=bypass_ppo_clip or decoupled_token_is."
        )
    row_rules = [rule.name for rule in correction.settings().rules if rule.rule.rejects_rows]
    if row_rules and options.usual_age >= 1:
        yield (
            f"{_CORRECTION}.rollout_rs={','.join(row_rules)} rejects whole rows outside a band "
            "that is made for two implementations of one policy: a policy that is a step old can leave it. "
            "Watch rollout_corr/rollout_rs_masked_fraction, and widen rollout_rs_threshold if it rises."
        )


def _is_changed(config: RunConfig, key: str) -> bool:
    """Whether a leaf, or any leaf of ``section.*``, differs from its default, or from the key that it
    follows."""
    for leaf in fnmatch.filter(fields_of(RunConfig), key):
        value, followed = attrgetter(leaf)(config), FOLLOWED_KEYS.get(leaf)
        is_own_value = followed is None or value != attrgetter(followed)(config)
        if is_own_value and value != fields_of(RunConfig)[leaf].default:
            return True
    return False
