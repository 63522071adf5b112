"""What the stages of a step request of the actor."""

from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from sound_run import sound_run

from verl_rc.config.load import load_run_config
from verl_rc.data.batches import Timed
from verl_rc.driver.stages import update_actor
from verl_rc.driver.step_record import StepRecord
from verl_rc.workers.updates import ActorReport


@pytest.mark.parametrize(
    ("proximal", "steps_done", "compares"),
    [
        ("interpolate", 48, False),
        ("interpolate", 49, True),
        ("interpolate", 50, False),
        ("recompute", 49, False),
    ],
)
def test_every_50th_step_compares_interpolated_log_probs(
    proximal: str, steps_done: int, compares: bool
) -> None:
    config = load_run_config(
        [
            *sound_run(),
            f"algorithm.rollout_correction.proximal={proximal}",
            "algorithm.rollout_correction.rollout_is=token",
            "async_training.staleness_threshold=1",
            "actor_rollout_ref.hybrid_engine=False",
        ]
    )
    services = Mock(config=config)
    services.actor.update.return_value = Timed(ActorReport([], [], []), 0.0)
    mask = torch.ones(1, 1, dtype=torch.bool)
    state = SimpleNamespace(step=steps_done, rollout_gap_limit=None)
    with patch("verl_rc.driver.stages.plan_mini_batches", return_value=[]):
        update_actor(services, state, Mock(response_mask=mask, loss_mask=mask), Mock(), StepRecord(), Mock())
    request = services.actor.update.call_args.args[3]
    assert request.compares_proximal is compares
