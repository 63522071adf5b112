"""Which models may bring Python code of their own."""

from verl_rc.config.run import RunConfig


def foreign_code(config: RunConfig) -> dict[str, str]:
    """For every ``trust_remote_code`` that is on, its key and the model whose code then runs with the user's rights."""
    model, critic, judge = config.actor_rollout_ref.model, config.critic.model, config.reward.reward_model
    switches = {
        "data.trust_remote_code": (config.data.trust_remote_code, model.path),
        "actor_rollout_ref.model.trust_remote_code": (model.trust_remote_code, model.path),
        "critic.model.trust_remote_code": (config.needs_critic and critic.trust_remote_code, critic.path),
        "reward.reward_model.trust_remote_code": (judge.enable and judge.trust_remote_code, judge.model_path),
    }
    return {key: str(path) for key, (is_on, path) in switches.items() if is_on}
