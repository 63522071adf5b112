"""The real loop by its other ways: bypass mode, LoRA with its own reference, a teacher, lent memory, two
engines; ended by Ctrl-C."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import left_over_processes, marked_environment
from small_runs import ROOT, run_overrides

from verl_rc.insight.page import build_page
from verl_rc.insight.run_folder import read_run
from verl_rc.insight.verdict import verdict_of
from verl_rc.metrics import check_names

OTHER_WAYS = [
    "algorithm.rollout_correction.preset=bypass_pg_geo_rs_token_tis",
    "algorithm.rollout_correction.rollout_rs_threshold=0.9_1.1",
    "algorithm.rollout_correction.diagnostics=full",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_type=k3+",
    "distillation.enabled=True",
    "actor_rollout_ref.ref.fsdp_config.dtype=float32",
    "distillation.distillation_loss.loss_mode=forward_kl_topk",
    "distillation.distillation_loss.topk=3",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "trainer.logger=[console,tensorboard]",
    "global_profiler.tool=torch",
    "global_profiler.steps=[1,2]",
    "global_profiler.profile_continuous_steps=True",
    "actor_rollout_ref.rollout.profiler.enable=True",
    "actor_rollout_ref.rollout.profiler.ranks=[1]",
    "trainer.save_freq=2",
    "trainer.total_epochs=1000",
    "trainer.total_training_steps=10000",
]


@pytest.fixture(scope="module")
def interrupted_run(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long run in whose terminal somebody presses Ctrl-C after step 3."""
    folder = tmp_path_factory.mktemp("other_ways")
    teacher = f"distillation.teacher_models.teacher_model.model_path={task['model']}"
    command = [sys.executable, "-m", "verl_rc.main_ppo", *run_overrides(task, folder), *OTHER_WAYS, teacher]
    environment = {**marked_environment(), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_listen_to_ctrl_c,
    ) as process:
        assert process.stdout is not None
        next((line for line in process.stdout if line.startswith("step 3/")), None)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to the whole process group
        try:
            _, errors = process.communicate(timeout=180)
        finally:
            process.kill()  # leaving the context waits for the process
    assert process.returncode == 130, errors[-3000:]
    assert errors.strip().endswith("interrupted")
    return folder


def _listen_to_ctrl_c() -> None:
    """A shell starts background jobs with SIGINT ignored, which processes inherit; this suite may be one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_everything_that_the_run_started(interrupted_run: Path) -> None:
    assert interrupted_run.is_dir()
    assert not left_over_processes()


@pytest.fixture(scope="module")
def steps(interrupted_run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (interrupted_run / "metrics.jsonl").read_text().splitlines()]


def test_no_old_log_probs_are_computed_and_the_actor_reports_the_correction(
    steps: list[dict[str, float]],
) -> None:
    check_names({name for line in steps for name in line} - {"step"})
    for line in steps[1:]:
        assert "timing_s/old_log_prob" not in line
        assert 0 < line["rollout_corr/rollout_is_eff_sample_size"] <= 1
        assert "rollout_corr/rollout_rs_seq_mean_k1_masked_fraction" in line
        assert "rollout_corr/token_age_mean" not in line  # which is 0
        assert line["sync/rollout_gap_mean"] < 1e-4
        assert line["actor/update_entropy"] > 0
        assert "actor/entropy" not in line


def test_the_reference_is_the_actor_before_training(steps: list[dict[str, float]]) -> None:
    assert abs(steps[1]["actor/kl_loss"]) < 1e-6
    assert "timing_s/ref" in steps[1]


def test_a_teacher_that_the_policy_starts_from_gives_its_tokens_the_same_log_probs(
    steps: list[dict[str, float]],
) -> None:
    assert abs(steps[1]["distillation/reverse_kl"]) < 1e-5
    assert steps[1]["distillation/student_mass"] == pytest.approx(
        steps[1]["distillation/teacher_mass"], abs=1e-5
    )
    assert 0 <= steps[1]["distillation/loss"] < 1e-5
    assert 0 < steps[1]["distillation/teacher_mass"] < 1
    assert "timing_s/teacher" in steps[1]


def test_validation_with_two_samples_and_tensorboard(
    interrupted_run: Path, steps: list[dict[str, float]]
) -> None:
    assert {"val-core/digits/acc/mean@2", "val-core/digits/acc/best@2/mean"} <= steps[0].keys()
    assert list((interrupted_run / "tensorboard").iterdir())


def test_a_rank_and_an_engine_have_a_trace_of_two_steps(interrupted_run: Path) -> None:
    names = {}
    for path in sorted((interrupted_run / "profile").iterdir()):
        with gzip.open(path) as file:
            names[path.name] = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    rank, engine = "steps_1-2_rank_0.json.gz", "steps_1-2_engine_1.json.gz"
    assert names.keys() == {rank, engine}
    for call in ("actor.update", "actor.compute_reference_log_probs", "teacher.compute_log_probs"):
        assert names[rank].count(call) == 2
    assert "_C::rotary_embedding" in names[engine]
    assert "actor.update" not in names[engine]
    page = build_page(run := read_run(interrupted_run), verdict_of(run))
    assert all(f'<a href="profile/{name}">{name}</a>' in page for name in names)


def test_the_checkpoint_of_a_lora_run_holds_the_adapters_alone(interrupted_run: Path) -> None:
    from verl_rc.runtime.checkpoint import load_full_state_dict

    names = load_full_state_dict(interrupted_run / "global_step_2" / "actor").keys()
    assert names
    assert all(".lora_" in name for name in names)
