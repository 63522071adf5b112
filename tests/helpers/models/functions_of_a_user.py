"""An advantage estimator and a policy loss as a user writes them, named ``functions_of_a_user:...``."""

from torch import Tensor

from verl_rc.algorithm.advantage import AdvantageInputs
from verl_rc.algorithm.losses import LossMetrics, PolicyLossInputs


def above_the_critic(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Rewards less values: it reads values, which a run must declare."""
    mask = inputs.response_mask
    return (inputs.token_level_rewards - inputs.values).where(mask, 0), inputs.token_level_rewards.where(
        mask, 0
    )


def log_probs_before(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Log-probs of the policy before the update, in the place of advantages."""
    assert inputs.old_log_probs is not None
    return inputs.old_log_probs, inputs.token_level_rewards


def loss_of_covariances(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """It reads statistics that no loss of a user's own is given."""
    return inputs.reduce(-inputs.advantages * inputs.mini_batch_statistics.threshold), {}
