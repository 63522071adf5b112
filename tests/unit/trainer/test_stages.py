"""What the stages of a step request of the actor."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from sound_run import sound_run

from verl_rc.config.load import load_run_config
from verl_rc.records.batches import Timed
from verl_rc.runtime.workers.updates import ActorReport
from verl_rc.trainer.stages import update_actor, write_samples
from verl_rc.trainer.step_record import StepRecord


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
    with patch("verl_rc.trainer.stages.plan_mini_batches", return_value=[]):
        update_actor(services, state, Mock(response_mask=mask, loss_mask=mask), Mock(), StepRecord())
    request = services.actor.update.call_args.args[3]
    assert request.compares_proximal is compares


def test_columns_of_the_reward_function_stand_beside_those_of_a_dump(tmp_path: Path) -> None:
    """Also those that a checkpoint of an older release holds under a name of the dump."""
    row = SimpleNamespace(prompt=[{"role": "user", "content": "12"}], ground_truth="12")
    extras = {"acc": [1.0], "reward/output": ["of the sandbox"], "step": [7]}
    samples = SimpleNamespace(rows=[row], texts=["12"], scores=torch.tensor([1.0]), extras=extras)
    write_samples(str(tmp_path), samples, 3)
    assert json.loads((tmp_path / "3.jsonl").read_text()) == {
        "input": row.prompt,
        "output": "12",
        "gts": "12",
        "score": 1.0,
        "step": 3,
        "acc": 1.0,
        "reward/output": "of the sandbox",
    }
