"""The doctor passes a run that can start, names each planted fault with what to do, and its exit code says
which it was."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small_runs import run_overrides

from verl_rc.cli import main


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["doctor", *arguments])
    return status, capsys.readouterr().out


def test_a_run_that_can_start(
    task: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    status, output = examined(capsys, *run_overrides(task, tmp_path / "run"))
    assert status == 0, output
    assert output.endswith("The run can start.\n")
    assert "FAIL" not in output
    for said in (
        "vllm",
        "cores",
        "the chat template",
        "64 prompts",
        "1 / 0",
        "memory of the engine",
        "host memory",
        "run folder",
    ):
        assert said in output
    assert not (tmp_path / "run").exists()


def without_column(task: dict[str, Path], folder: Path) -> list[str]:
    table = pq.read_table(task["data"] / "train.parquet").drop_columns("reward_model")
    pq.write_table(table, folder / "train.parquet")
    return [f"data.train_files={folder / 'train.parquet'}"]


def without_chat_template(task: dict[str, Path], folder: Path) -> list[str]:
    model = shutil.copytree(task["model"], folder / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = model / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"chat_template"', '"unused"'))
    return [f"actor_rollout_ref.model.path={model}"]


def with_a_reward_that_raises(task: dict[str, Path], folder: Path) -> list[str]:
    path = folder / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n"
    )
    return [f"reward.custom_reward_function.path={path}"]


def with_a_reward_that_hangs(task: dict[str, Path], folder: Path) -> list[str]:
    (folder / "hangs.py").write_text("def compute_score(**_):\n    while True:\n        pass\n")
    return [f"reward.custom_reward_function.path={folder / 'hangs.py'}", "reward.timeout_seconds=0.5"]


def with_a_reward_that_exits(task: dict[str, Path], folder: Path) -> list[str]:
    (folder / "exits.py").write_text("import os\n\n\ndef compute_score(**_):\n    os._exit(0)\n")
    return [f"reward.custom_reward_function.path={folder / 'exits.py'}"]


def in_a_file(task: dict[str, Path], folder: Path) -> list[str]:
    (folder / "file").touch()
    return [f"trainer.default_local_dir={folder / 'file' / 'run'}"]


FAULTS = {
    "missing column": (without_column, "data.train_files", "lacks ['reward_model']"),
    "no such data": (lambda task, folder: ["data.val_files=nowhere.parquet"], "data.val_files", "must exist"),
    "no such model": (lambda task, folder: ["actor_rollout_ref.model.path=./nowhere"], "model", "nowhere"),
    "no chat template": (without_chat_template, "tokenizer", "chat template"),
    "prompts too long": (
        lambda task, folder: ["data.max_prompt_length=5"],
        "data.train_files",
        "longer 100.0%",
    ),
    "sequences too long": (
        lambda task, folder: [
            "data.max_response_length=2000",
            "actor_rollout_ref.rollout.max_model_len=null",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        ],
        "model",
        "1024 positions",
    ),
    "too few prompts": (
        lambda task, folder: ["data.train_batch_size=128"],
        "data.train_files, size",
        "64 prompts",
    ),
    "a reward that raises": (with_a_reward_that_raises, "reward", "ZeroDivisionError"),
    "a reward that hangs": (with_a_reward_that_hangs, "reward", "it took longer than 0.5 s"),
    "a reward that exits": (with_a_reward_that_exits, "reward", "its process ended with exit code 0"),
    "too many ranks": (
        lambda task, folder: [
            "trainer.n_gpus_per_node=128",
            "data.train_batch_size=64",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        ],
        "cores",
        "128 rank(s)",
    ),
    "a folder in a file": (in_a_file, "run folder", "run"),
    "a cache beyond the machine": (
        lambda task, folder: ["actor_rollout_ref.rollout.kv_cache_megabytes=100000000"],
        "host memory",
        "at the peak",
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_every_fault_is_named(
    fault: str, task: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, subject, found = FAULTS[fault]
    overrides = [*run_overrides(task, tmp_path / "run"), *plant(task, tmp_path)]
    status, text = examined(capsys, *overrides)
    assert status == 1
    lines = text.splitlines()
    places = [index for index, line in enumerate(lines) if line.startswith(f"FAIL  {subject}: ")]
    assert places, text
    (place,) = places
    assert found in lines[place]
    assert lines[place + 1].split()[0] == "must"
    assert lines[place + 2].split()[0] == "do"
    assert "stand in the way" in lines[-1]


def test_contradictions_are_the_loaders(
    task: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        *run_overrides(task, tmp_path / "run"),
        "data.train_batch_size=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *overrides])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("configuration error:\n")


def test_longer_prompts_that_are_dealt_with_are_notes(
    task: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*run_overrides(task, tmp_path / "run"), "data.max_prompt_length=5", "data.truncation=left"]
    status, text = examined(capsys, *overrides)
    assert status == 0
    assert "longer 100.0%; those are cut (data.truncation=left)" in text
    status, text = examined(capsys, *overrides[:-1], "data.filter_overlong_prompts=True")
    assert status == 1
    assert "FAIL  data.train_files, size: 0 prompts" in text
