"""What must hold of a run with a teacher."""

from collections.abc import Iterator

from verl_rc.config.run import RunConfig

_LOSS = "distillation.distillation_loss"
_SUPERVISED = f"{_LOSS}.use_policy_gradient=False"
_ALONE = f"{_LOSS}.use_task_rewards=False"


def check_distillation(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each contradiction."""
    distillation, policy_loss = config.distillation, config.actor_rollout_ref.actor.policy_loss
    if not distillation.enabled:
        return
    loss = distillation.distillation_loss
    teachers = distillation.teacher_models
    if not teachers:
        yield (
            "distillation.enabled=True needs a teacher, got none; pass a model folder or hub id as "
            "distillation.teacher_models.teacher_model.model_path."
        )
    keys = [teacher.key for teacher in teachers.values()]
    if len(teachers) > 1 and (None in keys or len(set(keys)) < len(keys)):
        models = "distillation.teacher_models"
        given = ", ".join(f"{models}.{name}.key={teacher.key}" for name, teacher in teachers.items())
        yield (
            f"each of several teachers needs a data_source of its own as its key, got {given}; pass "
            f"{models}.{next(iter(teachers))}.key=<data_source>, and so on."
        )
    if loss.loss_mode in ("k1", "kl") and not loss.use_policy_gradient:
        yield (
            f"{_LOSS}.loss_mode={loss.loss_mode} with {_SUPERVISED} has a gradient that does not depend on "
            f"the teacher; pass {_LOSS}.use_policy_gradient=True, or loss_mode=k3."
        )
    if loss.loss_mode == "forward_kl_topk" and loss.use_policy_gradient:
        yield (
            f"{_LOSS}.loss_mode=forward_kl_topk is of many tokens, no advantage of the sampled one, got "
            f"{_LOSS}.use_policy_gradient=True; pass False, or loss_mode=k1."
        )
    if loss.use_task_rewards:
        return
    if policy_loss.loss_mode != "vanilla":
        yield (
            f"actor_rollout_ref.actor.policy_loss.loss_mode={policy_loss.loss_mode} trains on the task's "
            f"rewards, which {_ALONE} turns off; drop it."
        )
    if config.needs_critic:
        yield (
            f"a critic learns values of the task's rewards, which {_ALONE} turns off, got "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator}; pass grpo, and no critic.enable=True."
        )
    if config.algorithm.rollout_correction.rollout_opsm_threshold is not None:
        yield (
            "algorithm.rollout_correction.rollout_opsm_threshold rejects by the task's advantages, which "
            f"{_ALONE} turns off; drop it."
        )
