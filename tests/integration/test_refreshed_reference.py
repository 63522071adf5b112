"""A reference that is refreshed every second step: it is the actor then, and a resumed run has it."""

from pathlib import Path

import pytest
from real_runs import metrics_of, train
from small_runs import run_overrides

REFRESHED = [
    "actor_rollout_ref.ref.sync_freq=2",
    "actor_rollout_ref.ref.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.entropy_coeff=0.1",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "trainer.save_freq=3",
]


@pytest.mark.slow
def test_its_divergence_falls_to_zero_and_a_resumed_run_goes_on_with_it(
    task: dict[str, Path], tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run = train([*run_overrides(task, whole), *REFRESHED, "trainer.total_training_steps=4"])
    assert run.returncode == 0, run.stderr[-3000:]
    assert "step 2: the reference is the actor now" in run.stdout
    divergence = {step: line.get("actor/kl_loss") for step, line in metrics_of(whole).items()}
    assert divergence[1] == divergence[3] == 0
    assert divergence[2] > 0
    assert divergence[4] > 0
    source = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole / 'global_step_3'}"]
    again = train([*run_overrides(task, resumed), *REFRESHED, *source, "trainer.total_training_steps=4"])
    assert again.returncode == 0, again.stderr[-3000:]
    for name in ("actor/kl_loss", "actor/grad_norm", "actor/entropy"):
        assert metrics_of(resumed)[4][name] == metrics_of(whole)[4][name]
