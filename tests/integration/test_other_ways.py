"""The real loop by its other ways: bypass mode, LoRA with its own reference, lent memory, two engines, sampled validation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import ROOT, run_overrides

from verl_rc.metrics import check_names

OTHER_WAYS = [
    "algorithm.rollout_correction.preset=bypass_pg_geo_rs_token_tis",
    "algorithm.rollout_correction.rollout_rs_threshold=0.9_1.1",
    "algorithm.rollout_correction.diagnostics=full",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_type=k3+",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "trainer.logger=[console,tensorboard]",
    "trainer.save_freq=2",
]


@pytest.fixture(scope="module")
def finished_run(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other_ways")
    command = [sys.executable, "-m", "verl_rc.main_ppo", *run_overrides(task, folder), *OTHER_WAYS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def steps(finished_run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]


def test_no_old_log_probs_are_computed_and_the_actor_reports_the_correction(steps: list[dict[str, float]]) -> None:
    check_names({name for line in steps for name in line} - {"step"})
    for line in steps[1:]:
        assert "timing_s/old_log_prob" not in line
        assert 0 < line["rollout_corr/rollout_is_eff_sample_size"] <= 1
        assert "rollout_corr/rollout_rs_seq_mean_k1_masked_fraction" in line
        assert line["rollout_corr/token_age_mean"] == 0
        assert line["sync/rollout_gap_mean"] < 1e-4
        assert line["actor/entropy"] > 0


def test_the_reference_is_the_actor_before_training(steps: list[dict[str, float]]) -> None:
    assert abs(steps[1]["actor/kl_loss"]) < 1e-6
    assert "timing_s/ref" in steps[1]


def test_validation_with_two_samples_and_tensorboard(finished_run: Path, steps: list[dict[str, float]]) -> None:
    assert {"val-core/digits/acc/mean@2", "val-core/digits/acc/best@2/mean"} <= steps[0].keys()
    assert list((finished_run / "tensorboard").iterdir())


def test_the_checkpoint_of_a_lora_run_holds_the_adapters_alone(finished_run: Path) -> None:
    from verl_rc.checkpoint import load_full_state_dict

    names = load_full_state_dict(finished_run / "global_step_2" / "actor").keys()
    assert names
    assert all(".lora_" in name for name in names)
