"""How much one forward pass of each role may hold."""

from verl_rc.config.run import RunConfig
from verl_rc.data.microbatch import MicroBatchLimit


def log_prob_limit(config: RunConfig) -> MicroBatchLimit:
    """The actor without gradient."""
    rollout = config.actor_rollout_ref.rollout
    return _limit(
        rollout.log_prob_use_dynamic_bsz, rollout.log_prob_max_token_len_per_gpu, rollout.log_prob_micro_batch_size_per_gpu
    )


def reference_limit(config: RunConfig) -> MicroBatchLimit:
    """The reference policy."""
    ref = config.actor_rollout_ref.ref
    return _limit(ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu)


def actor_limit(config: RunConfig) -> MicroBatchLimit:
    """The actor's update."""
    actor = config.actor_rollout_ref.actor
    return _limit(actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu)


def critic_limit(config: RunConfig) -> MicroBatchLimit:
    """The critic, with gradient or without."""
    critic = config.critic
    return _limit(critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu)


def _limit(by_tokens: bool | None, max_tokens: int | None, max_rows: int | None) -> MicroBatchLimit:
    return MicroBatchLimit(max_tokens=max_tokens) if by_tokens else MicroBatchLimit(max_rows=max_rows)
