"""``reward``: no function of one's own by default."""

from verl_rc.config.reward import RewardConfig


def test_defaults_are_verls() -> None:
    custom = RewardConfig().custom_reward_function
    assert (custom.path, custom.name, custom.reward_kwargs) == (None, "compute_score", {})
