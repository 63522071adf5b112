"""Combinations with score centering that are refused."""

from collections.abc import Iterator

from verl_rc.config.algorithms import POLICY_LOSSES
from verl_rc.config.run import RunConfig

_KEY = "algorithm.rollout_correction.score_centering.enabled=True"


def check_centering(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each contradiction."""
    correction, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    if not correction.score_centering.enabled:
        return
    loss = correction.named_loss or actor.policy_loss.loss_mode
    spec = POLICY_LOSSES.get(loss)
    if spec is None or not spec.is_of_tokens:
        possible = ", ".join(
            name for name, one in POLICY_LOSSES.items() if one.is_loss_mode and one.is_of_tokens
        )
        yield (
            f"{_KEY} needs a loss whose share of a token depends on no other token, got {loss}; pass one of "
            f"{possible} (actor_rollout_ref.actor.policy_loss.loss_mode), or drop it."
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
