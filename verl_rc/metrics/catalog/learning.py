"""Learning: losses and gradients of actor and critic; scores, advantages, returns."""

from verl_rc.metrics.bounds import LOG_RATIO_BOUND
from verl_rc.metrics.catalog.spec import MetricSpec, spread

_BY_LOSS = "see the last table"


_UPDATES = (
    MetricSpec(
        "{role}/grad_norm",
        "1",
        "mean over updates of the L2 norm of the gradient of all weights, before clipping",
    ),
    MetricSpec(
        "{role}/nonfinite_gradients", "1", "updates skipped because their gradient was not finite", (0, 0)
    ),
    MetricSpec("{role}/loss_scale", "1", "factor on the loss in the last update; in float16 only"),
    MetricSpec(
        "{role}/overflowed_updates",
        "1",
        "updates skipped because gradient · loss_scale overflowed; each halves it",
    ),
    MetricSpec("{role}/lr", "1", "learning rate of the step's updates"),
)
"""Gradients and optimizer steps of actor and critic."""
_ACTOR = (
    MetricSpec(
        "actor/pg_loss",
        "1",
        "mean over updates of the policy loss, aggregated by actor.loss_agg_mode or as the loss prescribes",
    ),
    MetricSpec(
        "actor/loss",
        "1",
        "mean over updates of the whole loss: pg_loss − entropy_coeff · entropy_loss + kl_loss_coef · (KL "
        "estimate, aggregated like pg_loss) + distillation_loss_coef · distillation/loss, which replaces "
        "pg_loss with use_task_rewards=False",
    ),
    MetricSpec("actor/pg_clipfrac", "1", f"clipped tokens / tokens of the loss mask; {_BY_LOSS}", (0, 0.3)),
    MetricSpec(
        "actor/pg_clipfrac_lower",
        "1",
        f"tokens that a second bound clips / tokens of the loss mask; {_BY_LOSS}",
        (0, 0.05),
    ),
    MetricSpec(
        "actor/ratio_{side}",
        "1",
        "mean over updates, weighted by tokens, of the lower or upper end of bapo's clip range",
    ),
    MetricSpec(
        "actor/ppo_kl",
        "nats",
        f"mean over the loss mask of old − current log-prob: estimator k1 of KL(old || current); {_BY_LOSS}",
        (-0.01, 0.1),
    ),
    MetricSpec(
        "actor/ppo_kl_clamped_fraction",
        "1",
        f"tokens with |old − current log-prob| > {LOG_RATIO_BOUND:g} nats / tokens of the loss mask",
        (0, 0.001),
    ),
    MetricSpec(
        "actor/entropy",
        "nats",
        "mean over response tokens of the proximal policy's entropy; not in bypass mode or with "
        "proximal=interpolate",
    ),
    MetricSpec(
        "actor/entropy_coeff",
        "1",
        "weight of the entropy bonus, with algorithm.adaptive_entropy",
    ),
    MetricSpec(
        "actor/update_entropy",
        "nats",
        "mean over response tokens and updates of the current policy's entropy; in bypass mode and with "
        "proximal=interpolate only",
    ),
    MetricSpec(
        "actor/flipped_experts",
        "1",
        "response tokens for which the actor's own router chooses other experts in a layer / response "
        "tokens, over updates; with router replay",
    ),
    MetricSpec(
        "actor/proximal_interpolation_gap",
        "nats",
        "mean over response tokens and updates of |interpolated − recomputed proximal log-prob|, every 50th "
        "step",
    ),
    MetricSpec(
        "actor/entropy_loss",
        "nats",
        "mean over updates of the current policy's entropy, aggregated by actor.loss_agg_mode",
    ),
    MetricSpec(
        "actor/kl_loss",
        "nats",
        "mean over the loss mask and updates of the estimate actor.kl_loss_type of KL(current || reference)",
    ),
    MetricSpec("actor/kl_coef", "1", "factor of kl_loss in the loss"),
    MetricSpec(
        "actor/reward_kl_penalty",
        "nats",
        "mean over sequences of their mean KL estimate, which the reward loses with use_kl_in_reward",
    ),
    MetricSpec("actor/reward_kl_penalty_coeff", "1", "factor of reward_kl_penalty, from algorithm.kl_ctrl"),
)
_DISTILLATION = (
    MetricSpec(
        "distillation/loss",
        "1",
        "mean over updates of the teacher's term of the loss, before distillation_loss_coef",
    ),
    MetricSpec(
        "distillation/reverse_kl",
        "nats",
        "mean over the loss mask and updates of current − teacher log-prob: estimator k1 of KL(current || "
        "teacher)",
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
        "mean over the loss mask and updates of the probability that the current policy (student) or the "
        "teacher gives to the topk tokens of forward_kl_topk",
    ),
    MetricSpec(
        "distillation/clamped_fraction",
        "1",
        "tokens with |estimate loss_mode| > loss_max_clamp / tokens of the loss mask",
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
        "response tokens whose clipped value has the larger error / response tokens, over updates",
        (0, 0.3),
    ),
    MetricSpec("critic/vpred_mean", "reward", "mean over response tokens and updates of the value"),
    MetricSpec(
        "critic/vf_explained_var",
        "1",
        "1 − Var(returns − values) / (Var(returns) + 1e-5) over response tokens, before the updates",
        (0, 1),
    ),
)
_BATCH = (
    spread("critic/score", "reward", "score, over sequences"),
    spread(
        "reward/{column}",
        "of the column",
        "number that the reward function returns beside the score, over sequences that have it",
    ),
    MetricSpec(
        "reward/failed_fraction",
        "1",
        "sequences that could not be scored / sequences",
        (0, 0.01),
    ),
    spread("critic/rewards", "reward", "sum of token rewards (score − KL penalty), over sequences"),
    spread("critic/advantages", "1", "A, over response tokens"),
    spread("critic/returns", "reward", "return, over response tokens"),
    spread("critic/values", "reward", "critic's value before the updates, over response tokens"),
    MetricSpec(
        "gdpo/{key}/{statistic}",
        "reward",
        "component of the reward, over sequences; gdpo only",
    ),
)

LEARNING = (*_UPDATES, *_ACTOR, *_DISTILLATION, *_CRITIC, *_BATCH)
"""Entries of this section."""
