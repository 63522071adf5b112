"""Learning: losses and gradients of actor and critic; scores, advantages, returns."""

from verl_rc.metrics.bounds import LOG_RATIO_BOUND
from verl_rc.metrics.catalog.spec import MetricSpec, spread

_KEPT = ". With top_p, top_k or min_p, of the distribution over the kept tokens"
_BY_LOSS = "docs/metrics.md, Clipping by policy loss, says which"


_UPDATES = (
    MetricSpec(
        "{role}/grad_norm",
        "1",
        "mean over updates of the L2 norm of the gradient of all weights, before clipping",
    ),
    MetricSpec(
        "{role}/nonfinite_gradients", "1", "updates skipped because their gradient was not finite", (0, 0)
    ),
    MetricSpec(
        "{role}/loss_scale", "1", "factor on the loss in the last update of the step; in float16 only"
    ),
    MetricSpec(
        "{role}/overflowed_updates",
        "1",
        "updates skipped because the gradient, times loss_scale, overflowed; each halves loss_scale. In "
        "float16 only",
    ),
    MetricSpec("{role}/lr", "1", "learning rate of the step's updates"),
)
"""Gradients and optimizer steps of actor and critic."""
_ACTOR = (
    MetricSpec(
        "actor/pg_loss",
        "1",
        "mean over updates of the policy loss, aggregated over the loss mask by actor.loss_agg_mode",
    ),
    MetricSpec(
        "actor/loss",
        "1",
        "mean over updates of the loss that is differentiated: pg_loss − entropy_coeff · entropy_loss + "
        "kl_loss_coef · (the KL estimate, aggregated like pg_loss) + distillation_loss_coef · "
        "distillation/loss. With use_task_rewards=False, distillation/loss replaces pg_loss",
    ),
    MetricSpec(
        "actor/pg_clipfrac", "1", f"clipped tokens of the loss mask / its tokens; {_BY_LOSS}", (0, 0.3)
    ),
    MetricSpec(
        "actor/pg_clipfrac_lower",
        "1",
        f"tokens of the loss mask that a second bound clips / its tokens; {_BY_LOSS}",
        (0, 0.05),
    ),
    MetricSpec(
        "actor/ratio_{side}",
        "1",
        "mean over updates, weighted by tokens, of the lower or the upper end of bapo's clip range",
    ),
    MetricSpec(
        "actor/ppo_kl",
        "nats",
        "mean over the loss mask of old − current log-prob: estimator k1 of KL(old || current); "
        "docs/metrics.md, Clipping by policy loss, has what losses do otherwise",
        (-0.01, 0.1),
    ),
    MetricSpec(
        "actor/ppo_kl_clamped_fraction",
        "1",
        f"tokens of the loss mask with |old − current log-prob| > {LOG_RATIO_BOUND:g} nats / its tokens; the "
        f"loss and ppo_kl take ±{LOG_RATIO_BOUND:g} for them",
        (0, 0.001),
    ),
    MetricSpec(
        "actor/entropy",
        "nats",
        "mean over response tokens of the entropy of the proximal policy, before the first update; not in "
        f"bypass mode or with proximal=interpolate{_KEPT}",
    ),
    MetricSpec(
        "actor/update_entropy",
        "nats",
        "mean over response tokens and updates of the entropy of the current policy; only in bypass mode and "
        f"with proximal=interpolate{_KEPT}",
    ),
    MetricSpec(
        "actor/flipped_experts",
        "1",
        "response tokens for which the actor's own router takes other experts than the engine's in a layer / "
        "response tokens, over all updates; with router replay only",
    ),
    MetricSpec(
        "actor/proximal_interpolation_gap",
        "nats",
        "mean over response tokens of |interpolated − recomputed proximal log-prob|, over all updates of "
        "every 50th step; with rollout_correction.proximal=interpolate only",
    ),
    MetricSpec(
        "actor/entropy_loss",
        "nats",
        f"mean over updates of the entropy of the current policy, aggregated like pg_loss{_KEPT}",
    ),
    MetricSpec(
        "actor/kl_loss",
        "nats",
        "mean over the loss mask, in all updates, of the estimate actor.kl_loss_type of KL(current || "
        f"reference){_KEPT}",
    ),
    MetricSpec("actor/kl_coef", "1", "actor.kl_loss_coef, the factor of kl_loss in the loss"),
    MetricSpec(
        "actor/reward_kl_penalty",
        "nats",
        "mean over sequences of the mean KL estimate over the sequence's response tokens, which "
        f"algorithm.use_kl_in_reward subtracts from the reward{_KEPT}",
    ),
    MetricSpec("actor/reward_kl_penalty_coeff", "1", "factor of reward_kl_penalty, from algorithm.kl_ctrl"),
)
_DISTILLATION = (
    MetricSpec(
        "distillation/loss",
        "1",
        "mean over updates of the teacher's term of the loss, before distillation_loss_coef, aggregated like "
        "actor/pg_loss",
    ),
    MetricSpec(
        "distillation/reverse_kl",
        "nats",
        "mean over the loss mask, in all updates, of current − teacher log-prob: estimator k1 of KL(current "
        f"|| teacher){_KEPT}",
    ),
    MetricSpec(
        "distillation/abs_loss",
        "nats",
        "mean over the loss mask of |estimate loss_mode of KL(current || teacher)|, before loss_max_clamp; "
        "with forward_kl_topk the divergence over the topk tokens",
    ),
    MetricSpec(
        "distillation/{owner}_mass",
        "1",
        "mean over the loss mask, in all updates, of the probability that the current policy (student) or "
        "the teacher gives to the topk tokens of forward_kl_topk together",
    ),
    MetricSpec(
        "distillation/clamped_fraction",
        "1",
        "tokens of the loss mask with |estimate loss_mode| > loss_max_clamp / its tokens",
    ),
    MetricSpec(
        "distillation/{clipping}", "as actor/{clipping}", "actor/{clipping} of the teacher's term of the loss"
    ),
)
_CRITIC = (
    MetricSpec(
        "critic/vf_loss",
        "reward²",
        "mean over updates of ½ max((value − return)², (clipped value − return)²), aggregated over response "
        "tokens by critic.loss_agg_mode; clipped: to the value before the updates ± cliprange_value",
    ),
    MetricSpec(
        "critic/vf_clipfrac",
        "1",
        "response tokens for which the clipped value has the larger error / response tokens, in all updates",
        (0, 0.3),
    ),
    MetricSpec("critic/vpred_mean", "reward", "mean over response tokens, in all updates, of the value"),
    MetricSpec(
        "critic/vf_explained_var",
        "1",
        "1 − Var(returns − values) / (Var(returns) + 1e-5) over response tokens, before the updates",
        (0, 1),
    ),
)
_BATCH = (
    spread("critic/score", "reward", "sequences of the score"),
    spread(
        "reward/{column}",
        "of the column",
        "sequences of a number that the reward function returns beside the score; sequences without it do "
        "not count",
    ),
    MetricSpec(
        "reward/failed_fraction",
        "1",
        "sequences that could not be scored / sequences; each gets reward.failure_score, or counts as a "
        "wrong answer",
        (0, 0.01),
    ),
    spread("critic/rewards", "reward", "sequences of the sum of token rewards: score − KL penalty"),
    spread("critic/advantages", "1", "response tokens of A"),
    spread("critic/returns", "reward", "response tokens of the return"),
    spread("critic/values", "reward", "response tokens of the critic's value, before the updates"),
    MetricSpec(
        "gdpo/{key}/{statistic}",
        "reward",
        "mean, maximum, minimum or population standard deviation (std) over sequences of a component of the "
        "reward; gdpo only",
    ),
)

LEARNING = (*_UPDATES, *_ACTOR, *_DISTILLATION, *_CRITIC, *_BATCH)
"""Entries of this section."""
