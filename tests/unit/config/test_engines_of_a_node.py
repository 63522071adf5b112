"""An engine lies on one node or takes whole nodes (B6): another size is refused, with one that fits."""

from pathlib import Path

import pytest
from small_models import small_run_config

from verl_rc.config.errors import ConfigError

SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("nodes", "per_node", "size", "hybrid", "fits"),
    [
        (2, 6, 4, True, 3),
        (2, 8, 16, True, None),
        (3, 8, 12, True, 8),
        (2, 8, 8, True, None),
        (1, 8, 4, True, None),
        (2, 6, 4, False, None),
        (2, 8, 16, False, None),
        (3, 8, 12, False, 8),
    ],
)
def test_sizes(nodes: int, per_node: int, size: int, hybrid: bool, fits: int | None, tmp_path: Path) -> None:
    given = (
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={per_node}",
        f"{SIZE}={size}",
        "data.train_batch_size=48",
    )
    overrides = (
        *given,
        "actor_rollout_ref.actor.ppo_mini_batch_size=48",
        f"actor_rollout_ref.hybrid_engine={hybrid}",
    )
    if fits is None:
        small_run_config(tmp_path, *overrides)
        return
    with pytest.raises(
        ConfigError,
        match=rf"size={size} must divide the {per_node} engine devices of a node .* Pass {fits}\.",
    ):
        small_run_config(tmp_path, *overrides)
