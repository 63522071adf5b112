"""``doctor --gpu`` rehearsed on a CPU: an actor's rank trains, and an engine beside it loads its weights and
agrees with it."""

from pathlib import Path

import pytest
from small_runs import run_overrides

from verl_rc.config.load import load_run_config
from verl_rc.preflight.bring_up.run import STAGES, bring_up
from verl_rc.preflight.bring_up.stages import Stages


def test_a_rank_trains_and_an_engine_samples_from_its_weights(task: dict[str, Path], tmp_path: Path) -> None:
    stages = Stages(load_run_config([*run_overrides(task, tmp_path), "trainer.device=cpu"]))
    trained = stages.trainer()
    assert [finding.status for finding in trained.findings] == ["ok", "note"]
    assert trained.numbers["update_tokens_per_second"] > 0
    sampled = stages.engine()
    assert [finding.status for finding in sampled.findings] == ["ok", "note", "ok", "ok"]
    load = sampled.numbers["full_load"]
    assert load["sequences"] == 16  # of a step: 4 prompts, 4 samples
    # The engine samples in its process; what share of the time that has the CPU depends on other load.
    assert load["process_seconds"] > 0
    assert load["seconds"] > 0
    first, second = sampled.numbers["rounds"]
    assert first["sampled_tokens"] > 0
    assert first["sleeps"] is False  # only a GPU has memory to give back
    assert 0 < first["gap"]["mean"] < 0.06
    assert first["gap"] == second["gap"]  # the same weights, loaded twice


@pytest.mark.gpu
def test_all_stages_on_a_gpu(task: dict[str, Path], tmp_path: Path) -> None:
    config = load_run_config(
        [*run_overrides(task, tmp_path), "trainer.device=cuda", "trainer.n_gpus_per_node=1"]
    )
    found = list(bring_up(config, tmp_path / "doctor_gpu.json", STAGES))
    assert [finding for finding in found if finding.status == "failed"] == []
