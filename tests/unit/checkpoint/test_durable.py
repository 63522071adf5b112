import os
from pathlib import Path

import pytest

from verl_rc.checkpoint.store import sync, sync_tree


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the operating system was asked to write down, by name, in order."""
    found: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
    return found


def test_a_tree_is_on_the_disk_before_the_name_of_its_top_is(tmp_path: Path, synced: list[str]) -> None:
    (tmp_path / "top" / "below").mkdir(parents=True)
    for name in ("one", "below/two"):
        (tmp_path / "top" / name).write_text("x")
    sync_tree(tmp_path / "top")
    assert synced == ["two", "below", "one", "top"]


def test_one_file(tmp_path: Path, synced: list[str]) -> None:
    open_before = set(os.listdir("/proc/self/fd"))
    (tmp_path / "one").write_text("x")
    sync(tmp_path / "one")
    assert synced == ["one"]
    assert set(os.listdir("/proc/self/fd")) <= open_before
