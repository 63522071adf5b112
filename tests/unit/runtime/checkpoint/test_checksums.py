"""What is on the disk is what was written: any change of any file is found before something is loaded."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_learner import small_learner

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.runtime.checkpoint import (
    CheckpointError,
    RunState,
    SavedRun,
    load_full_state_dict,
    shards_problem,
)
from verl_rc.runtime.checkpoint.checksums import CHECKSUM_FILE, require_whole
from verl_rc.runtime.checkpoint.saved_files import read_tensors
from verl_rc.runtime.checkpoint.shards import collect_shards, load_shards, write_shards
from verl_rc.trainer import checkpoints

SHARDS = (".metadata", "__0_0.distcp", "random_state_0.pt", "shards.json")
STATE = ("data.pt", "run_state.json")


def write(folder: Path, step: int = 2) -> Path:
    (folder / "actor").mkdir(parents=True)
    write_shards(folder / "actor", collect_shards(*small_learner(40, 50), {}))
    SavedRun(RunState(step, prompts={"row": torch.arange(9)}), {}, num_ranks=1).save(folder)
    return folder


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def one_bit_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def two_blocks_exchanged(path: Path) -> None:
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[half : 2 * half] + content[:half] + content[2 * half :])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extended(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = (emptied, zeroed, one_bit_flipped, two_blocks_exchanged, cut, extended, unreadable, Path.unlink)


def test_the_sums_are_those_of_the_files(tmp_path: Path) -> None:
    for folder, names in ((write(tmp_path / "c"), STATE), (tmp_path / "c" / "actor", SHARDS)):
        sums = json.loads((folder / CHECKSUM_FILE).read_text())
        assert sums == {
            name: {"size": os.path.getsize(folder / name), "crc32": zlib.crc32((folder / name).read_bytes())}
            for name in names
        }
        assert {path.name for path in folder.iterdir() if path.is_file()} == {*names, CHECKSUM_FILE}
        require_whole(folder)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*SHARDS, CHECKSUM_FILE])
def test_damage_to_any_file_of_the_shards_is_found(
    tmp_path: Path, damage: Callable[[Path], Any], name: str
) -> None:
    folder = write(tmp_path / "c") / "actor"
    before = (folder / name).read_bytes()
    damage(folder / name)
    if (folder / name).is_file() and (folder / name).read_bytes() == before:
        return  # the exchanged blocks are equal
    said = str(shards_problem(folder))
    assert str(folder) in said
    assert "weights_only" not in said
    assert len(said.splitlines()) == 1
    with pytest.raises(CheckpointError):
        load_full_state_dict(folder)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*STATE, CHECKSUM_FILE])
def test_damage_to_any_file_of_the_driver_is_found(
    tmp_path: Path, damage: Callable[[Path], Any], name: str
) -> None:
    folder = write(tmp_path / "c")
    damage(folder / name)
    with pytest.raises(CheckpointError) as caught:
        SavedRun.load(folder)
    assert str(folder) in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("damage", [emptied, zeroed, cut])
def test_no_library_s_advice_to_load_it_unguarded_is_passed_on(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    """Also where a rank finds what the driver did not."""
    folder = write(tmp_path / "c") / "actor"
    for name in ("random_state_0.pt", "__0_0.distcp"):
        content = (folder / name).read_bytes()
        damage(folder / name)
        with pytest.raises(CheckpointError) as found:
            load_shards(folder, *small_learner(40, 50))
        assert "weights_only" not in str(found.value)
        assert len(str(found.value).splitlines()) == 1
        (folder / name).write_bytes(content)
    (folder / "code.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match="something else than tensors, or is damaged") as caught:
        read_tensors(folder / "code.pt", "tensors")
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("actor/random_state_0.pt", emptied),
        ("actor/__0_0.distcp", zeroed),
        ("actor/__0_0.distcp", one_bit_flipped),
        ("actor/.metadata", cut),
        ("actor/shards.json", Path.unlink),
        ("actor/checksums.json", Path.unlink),
        ("data.pt", one_bit_flipped),
        ("run_state.json", one_bit_flipped),
        ("checksums.json", emptied),
    ],
)
def test_auto_falls_back_to_the_whole_one_and_a_path_is_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    for number, step in enumerate((2, 4), start=1):
        (write(tmp_path / f"global_step_{step}", step) / "commit_number").write_text(f"{number}\n")
    damage(tmp_path / "global_step_4" / name)

    def choose(*given: str) -> tuple[Path | None, int]:
        config = load_run_config(["task=digits", "hardware=cpu", *given])
        _, folder, state = checkpoints.choose(config, tmp_path)
        return folder, state.step

    caplog.set_level("INFO", logger="verl_rc")
    assert choose() == (tmp_path / "global_step_2", 2)
    (said,) = (record.getMessage() for record in caplog.records if "falling back" in record.getMessage())
    assert str(tmp_path / "global_step_4") in said
    path = f"trainer.resume_from_path={tmp_path / 'global_step_4'}"
    with pytest.raises(ConfigError, match=r"trainer\.resume_from_path to be a checkpoint folder") as caught:
        choose("trainer.resume_mode=resume_path", path)
    assert len(str(caught.value).splitlines()) == 1
