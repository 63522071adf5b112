"""The command: 2 for what is wrong with configuration or data, with a message and no traceback."""

import sys

import pytest

from verl_rc import main_sft
from verl_rc.config.folder_owner import FolderClaim


def run(monkeypatch, capsys, *overrides):
    monkeypatch.setattr(sys, "argv", ["main_sft", *overrides])
    with pytest.raises(SystemExit) as raised:
        main_sft.main()
    return raised.value.code, capsys.readouterr().err


GIVEN = ["data.train_files=a.parquet", "data.val_files=a.parquet"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train_file=a.parquet"],
            "data.train_file is not a known key; the nearest is data.train_files",
        ),
        (GIVEN, "model"),
        (
            [*GIVEN, "model.path=m", "trainer.output_dir=o", "trainer.stop_at_accuracy=20"],
            "trainer.stop_at_accuracy",
        ),
        ([*GIVEN, "model.path=./nowhere", "trainer.output_dir=o"], "there is no such folder"),
        (
            [*GIVEN, "model.path=m", "trainer.output_dir=a.parquet/model"],
            "trainer.output_dir must be a folder",
        ),
    ],
)
def test_mistakes_end_with_2_and_a_message(overrides, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    code, written = run(monkeypatch, capsys, *overrides)
    assert code == 2
    assert message in written
    assert "Traceback" not in written


def test_a_folder_of_another_run_ends_with_2(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "model"
    with FolderClaim(folder, "run"):
        status, said = run(monkeypatch, capsys, *GIVEN, "model.path=m", f"trainer.output_dir={folder}")
    assert status == 2
    assert "trainer.output_dir=<folder>" in said
