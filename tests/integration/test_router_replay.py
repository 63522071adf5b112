"""Whole runs of a model with experts that replay them."""

from pathlib import Path

import pytest
from compared_runs import differences
from real_runs import metrics_of, of_folder, train
from small_runs import make_task, run_overrides, share_of_digits

pytestmark = pytest.mark.slow  # test_routed_experts.py has the engine and an actor
REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
NO_SHARING = "actor_rollout_ref.model.share_prefixes=False"
FURTHER = [
    *("actor_rollout_ref.model.enable_gradient_checkpointing=True", "trainer.save_freq=1"),
    *("actor_rollout_ref.actor.optim.lr=1e-3", "algorithm.use_kl_in_reward=True"),
]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("experts")
    task = make_task(folder, "--experts", "5")
    return [*run_overrides(task, folder / "nowhere"), share_of_digits(folder), *FURTHER]


def test_a_run_that_replays_the_experts_that_it_would_take_is_the_same_to_the_bit(
    overrides: list[str], tmp_path: Path
) -> None:
    """Engine and actor compute in float32, in which the experts are the same on both sides. Beside a
    replay only rows of equal experts share a prefix, so the sums would be made of other rows."""
    for name, further in (("own", []), ("replayed", [REPLAY])):
        result = train([*overrides, NO_SHARING, *further, *of_folder(tmp_path / name)])
        assert result.returncode == 0, result.stderr[-3000:]
    metrics = metrics_of(tmp_path / "replayed")
    for step in (1, 2):
        assert metrics[step]["rollout/routed_fraction"] == 1
        assert metrics[step]["actor/flipped_experts"] == 0
        assert metrics[step]["actor/grad_norm"] > 0
        assert metrics[step]["sync/canary_own_experts_gap"] == metrics[step]["sync/canary_mean_gap"]
    # what differs are the two metrics of replay, and the option in the saved configuration
    found = differences(tmp_path / "own", tmp_path / "replayed", 2)
    assert [one for one in found if not one.endswith(": metrics")] == []
    own = metrics_of(tmp_path / "own")
    for step in (1, 2):
        names = [name for name in own[step] if name.startswith(("actor/", "rollout_corr/", "critic/"))]
        assert len(names) > 30
        assert {name: own[step][name] for name in names} == {name: metrics[step][name] for name in names}
