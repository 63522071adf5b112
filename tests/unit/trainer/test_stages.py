"""What the stages of a step write."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import torch
from sound_run import sound_run

from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.config.load import load_run_config
from verl_rc.runtime.workers.updates import ActorReport
from verl_rc.trainer.cluster.remote import Timed
from verl_rc.trainer.stages import update_actor, write_samples


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


def test_the_factor_of_the_correction_reaches_the_actor() -> None:
    config = load_run_config(sound_run())
    services = Mock(config=config)
    services.actor.update.return_value = Timed(ActorReport([], [], []), 0.0)
    mask = torch.ones(1, dtype=torch.bool)
    batch = SimpleNamespace(
        response_mask=mask, untruncated_mask=mask, loss_mask=mask, row_sums=lambda values: values
    )
    inputs = Mock(batch=batch)
    inputs.correction.learning_rate_factor.return_value = 0.5
    step = Mock(number=3, corrector=corrector_of(config.algorithm.rollout_correction))
    step.record.timed = lambda name, call, *arguments: call(*arguments).result
    with patch("verl_rc.trainer.stages.plan_mini_batches", return_value=[]):
        update_actor(services, None, inputs, step)
    assert services.actor.update.call_args.args[-1].learning_rate_factor == 0.5
