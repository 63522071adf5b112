"""Learning: losses and gradients of actor and critic; scores, advantages, returns."""

from verl_rc.config.algorithms import POLICY_LOSSES
from verl_rc.metrics.catalog.spec import MetricSpec, spread

_KEPT = "; with top_p, top_k or min_p of the distribution over the kept tokens"
_GRAD_COSINE = (
    "cosine of an update's whole gradient and the optimizer's mean of those before (AdamW's first moment), "
    "mean over updates"
)


def _losses(*kinds: str) -> str:
    """Policy losses by what they average as ``actor/ppo_kl``."""
    return ", ".join(name for name, spec in POLICY_LOSSES.items() if spec.ppo_kl in kinds)


_ACTOR = (
    MetricSpec(
        "actor/pg_loss",
        "1",
        "policy loss, aggregated by actor.loss_agg_mode over loss_mask, mean over updates",
    ),
    MetricSpec(
        "actor/loss",
        "1",
        "what was differentiated: pg_loss − entropy_coeff · entropy_loss + kl_loss_coef · the KL estimate "
        "aggregated likewise + distillation_loss_coef · distillation/loss, which stands for pg_loss with "
        "use_task_rewards=False",
    ),
    MetricSpec(
        "actor/pg_clipfrac",
        "1",
        "share of tokens in loss_mask that the bounds of the loss act on. vanilla, bapo, gspo, luspo: the "
        "clipped branch is the larger one; cispo: the ratio is outside the band; geo_mean: the log-ratio is, "
        "and A > 0; dppo_tv, dppo_kl, prime_rl, aspo: outside the region; clip_cov, m2po: left out; sapo, "
        "vespo, topr: 0; gpg, kl_cov, dro, reinforce: none",
        (0, 0.3),
    ),
    MetricSpec(
        "actor/pg_clipfrac_lower",
        "1",
        "share of tokens in loss_mask on the other side. vanilla, bapo: the dual clip acts (A < 0, ratio > "
        "clip_ratio_c); geo_mean: the log-ratio is outside the band, and A < 0; dppo_tv, dppo_kl, aspo: "
        "inside the region, where clip_ratio_c caps the ratio; topr: A < 0, and the row's ratio is held at "
        "1; gspo, luspo, cispo, prime_rl, sapo, vespo: 0; clip_cov, m2po, gpg, kl_cov, dro, "
        "reinforce: none",
        (0, 0.05),
    ),
    MetricSpec("actor/ratio_low", "1", "lower end of bapo's clip range, mean over mini-batches by tokens"),
    MetricSpec("actor/ratio_high", "1", "upper end of bapo's clip range, mean over mini-batches by tokens"),
    MetricSpec(
        "actor/ppo_kl",
        "nats",
        "mean over tokens in loss_mask of old − current log-prob, k1 of KL(old || current); old: proximal, "
        f"in bypass mode rollout; each term clamped to ±20 nats but in {_losses('whole', 'distance')}; "
        f"{_losses('distance')}: of |old − current|; {_losses('none')}: none",
        (-0.01, 0.1),
    ),
    MetricSpec(
        "actor/ppo_kl_clamped_fraction",
        "1",
        "share of tokens in loss_mask whose old − current log-prob was clamped, in ppo_kl and in the ratio "
        "of the loss",
        (0, 0.001),
    ),
    MetricSpec(
        "actor/entropy",
        "nats",
        "mean over response tokens of the proximal policy's entropy, before the updates of the step; absent "
        f"in bypass mode and with proximal=interpolate, which do not compute it{_KEPT}",
    ),
    MetricSpec(
        "actor/update_entropy",
        "nats",
        "mean over response tokens of the current policy's entropy, over all updates of the step; in bypass "
        f"mode and with proximal=interpolate{_KEPT}",
    ),
    MetricSpec(
        "actor/flipped_experts",
        "1",
        "with router replay: response tokens at whose place the actor itself would take other experts, in a "
        "layer, than the engine took / all, over all updates of the step",
    ),
    MetricSpec(
        "actor/proximal_interpolation_gap",
        "nats",
        "mean over response tokens of |interpolated − recomputed proximal log-prob|, over all updates of "
        "every 50th step; with rollout_correction.proximal=interpolate",
    ),
    MetricSpec(
        "actor/entropy_loss", "nats", f"entropy of the current policy, aggregated like pg_loss{_KEPT}"
    ),
    MetricSpec(
        "actor/kl_loss",
        "nats",
        "mean over tokens in loss_mask of the actor.kl_loss_type estimate of KL(current || reference), over "
        f"all updates{_KEPT}",
    ),
    MetricSpec("actor/kl_coef", "1", "coefficient of kl_loss in the loss"),
    MetricSpec("actor/grad_norm", "1", "L2 norm of the whole gradient before clipping, mean over updates"),
    MetricSpec(
        "actor/grad_cosine",
        "1",
        f"{_GRAD_COSINE}; under asynchrony, the cosine of consecutive gradients is reported to rise before a "
        "collapse (arXiv:2603.01501); in CorrectionBench a higher one over steps 2 to 5 went with a lower "
        "score",
    ),
    MetricSpec(
        "actor/nonfinite_gradients",
        "1",
        "updates of the step skipped because the gradient was not finite",
        (0, 0),
    ),
    MetricSpec(
        "actor/loss_scale",
        "1",
        "what the loss of the step's last update was multiplied by; in float16",
    ),
    MetricSpec(
        "actor/overflowed_updates",
        "1",
        "updates of the step skipped because the loss's scale was too large for float16, and halved; in "
        "float16",
    ),
    MetricSpec("actor/lr", "1", "learning rate of the step's last update"),
    MetricSpec(
        "actor/reward_kl_penalty",
        "nats",
        f"mean over sequences of the masked mean KL subtracted from the reward{_KEPT}",
    ),
    MetricSpec("actor/reward_kl_penalty_coeff", "1", "its coefficient, from algorithm.kl_ctrl"),
)
_DISTILLATION = (
    MetricSpec(
        "distillation/loss",
        "1",
        "the teacher's term of the loss before distillation_loss_coef, aggregated like actor/pg_loss",
    ),
    MetricSpec(
        "distillation/reverse_kl",
        "nats",
        "mean over tokens in loss_mask of log π − log π_teacher, k1 of KL(current || teacher), over all "
        f"updates; 0 where the policy is the teacher{_KEPT}",
    ),
    MetricSpec(
        "distillation/abs_loss",
        "nats",
        "mean over tokens in loss_mask of the absolute value of the loss_mode estimate of KL(current || "
        "teacher), or of the divergence of forward_kl_topk, before loss_max_clamp",
    ),
    *(
        MetricSpec(
            f"distillation/{owner}_mass",
            "1",
            f"mean over tokens in loss_mask of the probability that {policy} gives to the topk tokens of "
            "forward_kl_topk together, over all updates",
        )
        for owner, policy in (("student", "the current policy"), ("teacher", "the teacher"))
    ),
    MetricSpec(
        "distillation/clamped_fraction",
        "1",
        "share of tokens in loss_mask whose estimate is outside ± loss_max_clamp",
    ),
    *(
        MetricSpec(f"distillation/{name}", unit, f"actor/{name} of the teacher's advantages")
        for name, unit in (
            ("pg_clipfrac", "1"),
            ("pg_clipfrac_lower", "1"),
            ("ppo_kl", "nats"),
            ("ppo_kl_clamped_fraction", "1"),
        )
    ),
)
_CRITIC = (
    MetricSpec(
        "critic/vf_loss",
        "reward²",
        "half the squared error of the value, or of the value clipped to old value ± cliprange_value if that "
        "is larger; aggregated by critic.loss_agg_mode, mean over updates",
    ),
    MetricSpec(
        "critic/vf_clipfrac",
        "1",
        "share of tokens in response_mask where the clipped branch was larger",
        (0, 0.3),
    ),
    MetricSpec("critic/vpred_mean", "reward", "mean over tokens in response_mask of the predicted value"),
    MetricSpec(
        "critic/grad_norm", "1", "L2 norm of the critic's whole gradient before clipping, mean over updates"
    ),
    MetricSpec("critic/grad_cosine", "1", f"{_GRAD_COSINE}, of the critic"),
    MetricSpec(
        "critic/nonfinite_gradients",
        "1",
        "critic updates of the step skipped because the gradient was not finite",
        (0, 0),
    ),
    MetricSpec(
        "critic/loss_scale",
        "1",
        "what the critic's loss of the step's last update was multiplied by; in float16",
    ),
    MetricSpec(
        "critic/overflowed_updates",
        "1",
        "critic updates of the step skipped because the loss's scale was too large for float16, and halved; "
        "in float16",
    ),
    MetricSpec("critic/lr", "1", "learning rate of the step's last critic update"),
    MetricSpec(
        "critic/vf_explained_var",
        "1",
        "1 − Var(returns − values) / (Var(returns) + 1e-5) over response tokens",
        (0, 1),
    ),
)
_BATCH = (
    *spread("critic/score", "reward", "sequences of the reward function's score"),
    *spread(
        "critic/overlong_reward",
        "reward",
        "sequences of the overlong penalty, which is part of the score",
    ),
    MetricSpec(
        "critic/reward_baselines/mean",
        "reward",
        "mean over prompts of the greedy response's score (remax)",
    ),
    *spread(
        "reward/{column}",
        "of the column",
        "the responses that have it of a column of the reward function",
    ),
    MetricSpec(
        "reward/failed_fraction",
        "1",
        "share of responses that could not be scored; each got reward.failure_score, or counts as a wrong "
        "answer",
        (0, 0.01),
    ),
    *spread("critic/rewards", "reward", "sequences of the summed token rewards (score less KL penalty)"),
    *spread("critic/advantages", "1", "response tokens of the advantage"),
    *spread("critic/returns", "reward", "response tokens of the return"),
    *spread("critic/values", "reward", "response tokens of the critic's value"),
    MetricSpec(
        "gdpo/{key}/{statistic}",
        "reward",
        "statistic over sequences of one reward component of gdpo",
    ),
)

LEARNING = (*_ACTOR, *_DISTILLATION, *_CRITIC, *_BATCH)
"""Entries of this section."""
