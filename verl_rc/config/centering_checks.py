"""Combinations with score centering that are refused."""

from collections.abc import Iterator

from verl_rc.config.algorithms import POLICY_LOSSES
from verl_rc.config.run import RunConfig

_CORRECTION = "algorithm.rollout_correction"
_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_KEY = f"{_CORRECTION}.score_centering.enabled=True"


def check_centering(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each contradiction."""
    correction, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    if not correction.score_centering.enabled:
        return
    tail = correction.score_centering.tail
    loss = correction.named_loss or actor.policy_loss.loss_mode
    spec = POLICY_LOSSES.get(loss)
    if spec is None or not spec.is_of_tokens:
        possible = ", ".join(
            name for name, one in POLICY_LOSSES.items() if one.is_loss_mode and one.is_of_tokens
        )
        named = f"{_CORRECTION}.loss_type={loss}" if correction.named_loss else loss
        remedy = "loss_type=ppo_clip or reinforce" if correction.named_loss else f"{_LOSS_MODE} of {possible}"
        yield (
            f"{_KEY} needs a loss whose share of a token depends on no other token, got {named}; pass "
            f"{remedy}, or drop it."
        )
    elif spec.clips_by_probability and correction.mode == "bypass" and tail == "proportional":
        yield (
            f"{_KEY} with {_CORRECTION}.score_centering.tail=proportional takes many tokens as one, whose "
            f"probability {_LOSS_MODE}={loss} would clip by; pass tail=none or another loss."
        )
    of_tokens = [rule.name for rule in correction.settings().rules if not rule.rule.rejects_rows]
    if of_tokens:
        yield (
            f"{_KEY} needs rules that reject whole rows, got {_CORRECTION}.rollout_rs={','.join(of_tokens)}, "
            "which would judge the sampled token but not those that center it; pass rollout_is=token with a "
            "band such as rollout_is_threshold=0.5_5.0, which judges each of them, or drop one of the two."
        )
    distillation = config.distillation.loss
    if distillation is not None and not distillation.use_task_rewards:
        yield (
            f"{_KEY} centers the loss of the task's rewards, which "
            "distillation.distillation_loss.use_task_rewards=False turns off; drop one of them."
        )
    if distillation is not None and distillation.loss_mode == "forward_kl_topk":
        yield (
            f"{_KEY} and distillation.distillation_loss.loss_mode=forward_kl_topk both ask the actor for "
            "further tokens at each place, and it can score one list of them; drop one of them."
        )
    if config.actor_rollout_ref.exact:
        yield f"{_KEY} is not proven with actor_rollout_ref.exact=True; drop one of them."
