"""The command: every folder that a run writes to is its own before anything is loaded."""

import sys
from pathlib import Path

import pytest

from verl_rc import main_ppo
from verl_rc.config import folder_owner
from verl_rc.config.folder_owner import OWNER_FILE, FolderClaim, FolderLostError, living_owner
from verl_rc.config.run import RunConfig

KEYS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Start a run in three folders; ``run`` takes its place."""

    def call(run) -> int | str | None:  # type: ignore[no-untyped-def]
        monkeypatch.setattr(main_ppo, "_train", run)
        monkeypatch.setattr("verl_rc.config.load._checked", lambda config: config)
        given = [f"{key}={tmp_path / key}" for key in KEYS]
        monkeypatch.setattr(sys, "argv", ["main_ppo", "task=digits", "hardware=cpu", *given])
        try:
            main_ppo.main()
        except SystemExit as error:
            return error.code
        return 0

    return call


def test_the_folders_are_the_runs_own_as_long_as_it_lasts(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    owners: list[str | None] = []

    def run(config: RunConfig) -> None:
        owners.extend(living_owner(tmp_path / key) for key in KEYS)

    assert start(run) == 0
    assert None not in owners
    assert [path for key in KEYS for path in (tmp_path / key).iterdir()] == []


@pytest.mark.parametrize("key", KEYS)
def test_a_folder_of_another_run_ends_the_start_with_2_and_its_key(  # type: ignore[no-untyped-def]
    start, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = FolderClaim(tmp_path / key, "run")
    monkeypatch.setattr(folder_owner, "_HELD", {})  # as another process sees it
    assert start(lambda config: pytest.fail("it began")) == 2
    said = capsys.readouterr().err
    assert "belongs to process" in said
    assert f"{key}=<folder>" in said
    claim.require()


def test_a_lost_folder_ends_the_run_with_1_and_a_sentence(  # type: ignore[no-untyped-def]
    start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: RunConfig) -> None:
        (tmp_path / KEYS[0] / OWNER_FILE).write_text("of another run")
        with FolderClaim(tmp_path / KEYS[0], "part"):
            pytest.fail("it went on")

    assert start(run) == 1
    said = capsys.readouterr().err
    assert said.startswith("the run ended: ")
    assert FolderLostError.__name__ not in said
    assert (tmp_path / KEYS[0] / OWNER_FILE).read_text() == "of another run"
