"""The command: quick help, one line and status 2 for every mistake, a folder for everything else."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoints import STEP, write_checkpoint, write_tiny_model
from small_models import small_run_config
from small_runs import ROOT
from sound_run import sound_run

from verl_rc.cli import main


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without critic and without LoRA, whose model stays where it was."""
    folder = tmp_path_factory.mktemp("run")
    write_checkpoint(small_run_config(write_tiny_model(folder / "model")), folder / f"global_step_{STEP}")
    return folder


def command(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    given = [sys.executable, "-X", "importtime", "-m", "verl_rc.cli", *arguments]
    return subprocess.run(given, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def imported_by(result: "subprocess.CompletedProcess[str]") -> set[str]:
    return {
        line.rpartition("|")[2].strip()
        for line in result.stderr.splitlines()
        if line.startswith("import time:")
    }


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["--help"], 0), (["export", "--help"], 0)])
def test_help_loads_nothing_heavy(arguments: list[str], status: int, tmp_path: Path) -> None:
    result = command(*arguments, folder=tmp_path)
    assert result.returncode == status
    assert "export" in result.stdout + result.stderr
    imported = imported_by(result)
    assert "argparse" in imported
    assert not imported & {"torch", "transformers", "numpy", "pydantic", "ray", "vllm"}


def test_explain_loads_no_torch(tmp_path: Path) -> None:
    result = command("explain", *sound_run(), folder=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith("Objective")
    imported = imported_by(result)
    assert "hydra" in imported
    assert not imported & {"torch", "tensordict", "transformers", "numpy", "ray", "vllm"}


def test_export_says_what_it_wrote(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, output = str(run_folder / f"global_step_{STEP}"), str(tmp_path / "out")
    assert main(["export", checkpoint, "--output", output, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"{output}: Qwen2ForCausalLM after step {STEP}, bfloat16\n"
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.bfloat16
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["export", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("verl-rc export: ")
    return line


def test_the_output_folder_is_never_overwritten(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").touch()
    checkpoint = str(run_folder / f"global_step_{STEP}")
    assert "--output must name a new or an empty folder" in refused(
        capsys, checkpoint, "--output", str(tmp_path)
    )
    assert "is neither" in refused(capsys, checkpoint, "--output", str(tmp_path / "precious"))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere"], "a checkpoint must be a folder, but there is none at"),
        (["model"], "a checkpoint must hold run_state.json, but"),
        (["."], f"is a folder global_step_N; the newest in {{folder}} is {{folder}}/global_step_{STEP}"),
        ([f"global_step_{STEP}", "--critic"], "--critic needs a run that trains a critic"),
        ([f"global_step_{STEP}", "--adapter"], "--adapter needs a run that trains LoRA adapters"),
        ([f"global_step_{STEP}", "--model", "./moved"], "./moved is not a model folder or hub id"),
        (
            [f"global_step_{STEP}", "--model", "nobody/no-such-model"],
            "If it moved, say where it is with --model",
        ),
    ],
)
def test_mistakes_are_one_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    line = refused(capsys, str(run_folder / given[0]), *given[1:], "--output", str(tmp_path / "out"))
    assert message.format(folder=run_folder) in line
    assert not (tmp_path / "out").exists()


def cut_shards(checkpoint: Path) -> None:
    for path in (checkpoint / "actor").glob("*.distcp"):
        path.write_bytes(b"short")


def lose_shards(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "actor")


@pytest.mark.parametrize(
    ("damage", "message"), [(cut_shards, "__0_0.distcp must have"), (lose_shards, "must hold shards.json")]
)
def test_a_damaged_checkpoint_is_one_line(
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    message: str,
) -> None:
    checkpoint = shutil.copytree(run_folder / f"global_step_{STEP}", tmp_path / "global_step_9")
    damage(checkpoint)
    assert message in refused(capsys, str(checkpoint), "--output", str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (["bench", "all"], "scripts.research.exact_track"),
        (["what-if", "run"], "docs/rollout_correction.md"),
        (["convert", "tokens", "out.jsonl"], "docs/token_record.md"),
        (["diagnose", "run", "--model=base"], "docs/token_record.md"),
        (["diagnose", "run", "--replay", "R0,R7"], "--replay must be of R0, R3, got R7"),
        (["doctor", "task=digits", "--gpu"], "HARDWARE=1gpu bash scripts/quickstart.sh"),
        (["trace", "run", "--steps", "1-2"], "https://ui.perfetto.dev opens the trace.json"),
    ],
)
def test_what_is_not_there_names_what_to_use(
    given: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert instead in line


def test_what_cannot_go_together_is_argparses_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["export", "c", "--output", "o", "--critic", "--adapter"])
    assert raised.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_migrate_prints_overrides_and_says_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "actor_rollout_ref.actor.tis_imp_ratio_cap=2.0", "trainer.nnodes=1"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "trainer.nnodes=1",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
    ]
    assert all(line.startswith("# ") for line in printed.err.splitlines())


def test_migrate_writes_a_recipe_that_explain_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (
        "actor_rollout_ref.model.path=org/model data.train_files=a.parquet data.val_files=b.parquet "
        "trainer.n_gpus_per_node=2"
    )
    more = (
        "actor_rollout_ref.actor.use_dynamic_bsz=True +actor_rollout_ref.actor.tis_imp_ratio_cap=2.5 "
        "trainer.device=cpu"
    )
    (tmp_path / "verl.sh").write_text(f"python3 -m verl.trainer.main_ppo {keys} \\\n  {more} $@\n")
    assert main(["migrate", "--recipe", str(tmp_path / "verl.sh")]) == 0
    (tmp_path / "recipe.sh").write_text(capsys.readouterr().out)
    assert main(["explain", str(tmp_path / "recipe.sh"), "trainer.total_training_steps=7"]) == 0
    plan = capsys.readouterr().out
    assert "at most 2.5 (rollout_is_weights)" in plan
    assert "training steps: 7" in plan


@pytest.mark.parametrize("arguments", [["migrate", "nowhere.yaml"], ["presets", "decoupled_sq_is"]])
def test_mistakes_of_other_commands_are_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"verl-rc {arguments[0]}: ")


def test_presets_are_printed_as_their_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "decoupled_seq_is_rs", "disabled"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rules = "rollout_rs=seq_sum_k1, rollout_rs_threshold=0.5_2.0"
    assert lines[0] == f"decoupled_seq_is_rs: rollout_is=sequence, rollout_is_threshold=2.0, {rules}"
    assert lines[1].startswith(
        "    sequence weights; sequences with a ratio outside [0.5, 2] are rejected (verl"
    )
    assert lines[2] == "disabled: measures only"
