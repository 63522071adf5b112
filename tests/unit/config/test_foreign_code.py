"""Code that comes with a model runs only where somebody said so, and is named."""

from pathlib import Path

from small_models import small_run_config

from verl_rc.config.run import foreign_code


def test_nobody_brings_code_by_default(tmp_path: Path) -> None:
    assert foreign_code(small_run_config(tmp_path, "algorithm.adv_estimator=gae", "critic.use_dynamic_bsz=True")) == {}


def test_every_switch_is_named_with_its_model(tmp_path: Path) -> None:
    config = small_run_config(
        tmp_path,
        "data.trust_remote_code=True",
        "actor_rollout_ref.model.trust_remote_code=True",
        "algorithm.adv_estimator=gae",
        "critic.use_dynamic_bsz=True",
        "critic.model.path=other/critic",
        "reward.reward_model.enable=True",
        "reward.reward_model.model_path=other/judge",
        "reward.reward_model.trust_remote_code=True",
    )
    path = config.actor_rollout_ref.model.path
    assert foreign_code(config) == {
        "data.trust_remote_code": path,
        "actor_rollout_ref.model.trust_remote_code": path,
        "critic.model.trust_remote_code": "other/critic",  # follows the actor's
        "reward.reward_model.trust_remote_code": "other/judge",
    }
