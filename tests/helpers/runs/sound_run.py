"""Overrides of a run without a mistake, for tests that add to them."""

from collections.abc import Container

_OVERRIDES = {
    "data.train_files": "a.parquet",
    "data.val_files": "b.parquet",
    "data.train_batch_size": "32",
    "actor_rollout_ref.model.path": "org/model",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "16",
    "actor_rollout_ref.actor.use_dynamic_bsz": "True",
    "actor_rollout_ref.rollout.n": "2",
}


def sound_run(estimator: str = "grpo", without: Container[str] = ()) -> list[str]:
    """All of them, but for the keys that a test gives itself."""
    overrides = {**_OVERRIDES, "algorithm.adv_estimator": estimator}
    return [f"{key}={value}" for key, value in overrides.items() if key not in without]
