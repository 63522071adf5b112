"""Checkpoints as folders: complete or absent, found again, on the disk for sure."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_rc.config.folder_owner import OWNER_FILE, FolderLostError, FolderTakenError
from verl_rc.runtime.checkpoint.store import LATEST_FILE, CheckpointError, CheckpointStore, sync, sync_tree


def write(store: CheckpointStore, step: int, content: str = "") -> Path:
    (store.begin(step) / "actor").mkdir()
    (store._folder(step, ".partial") / "actor" / "weights").write_text(content or str(step))
    return store.commit(step)


def names(folder: Path) -> list[str]:
    """What lies in a run's folder, besides the name of its owner."""
    return sorted(path.name for path in folder.iterdir() if path.name != OWNER_FILE)


def content(folder: Path) -> str:
    return (folder / "actor" / "weights").read_text()


def readable(folder: Path) -> str | None:
    return None if (folder / "actor" / "weights").is_file() else "no weights"


def unreadable(*bad: str) -> Callable[[Path], str | None]:
    return lambda folder: "broken" if folder.name in bad else None


def test_a_commit_is_complete_named_and_listed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", None)
    assert store.newest_first() == []
    folder = write(store, 3)
    assert folder == tmp_path / "run" / "global_step_3"
    assert content(folder) == "3"
    assert names(tmp_path / "run") == ["global_step_3", LATEST_FILE]
    assert (tmp_path / "run" / LATEST_FILE).read_text() == "3\n"
    write(store, 10)
    assert [path.name for path in store.newest_first()] == ["global_step_10", "global_step_3"]


def test_begin_clears_what_was_left_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, None)
    (store.begin(1) / "half").write_text("x")
    (store.begin(2) / "half").write_text("x")
    assert names(tmp_path) == ["global_step_2.partial"]
    assert store.newest_first() == []
    assert list(store.begin(2).iterdir()) == []


def test_commit_without_begin(tmp_path: Path) -> None:
    for action in (CheckpointStore(tmp_path, None).commit, CheckpointStore(tmp_path, None).seal):
        with pytest.raises(CheckpointError, match=r"begin\(4\)"):
            action(4)


def test_keep_counts_what_is_on_disk_also_after_a_resume(tmp_path: Path) -> None:
    first = CheckpointStore(tmp_path, most=2)
    for step in (1, 2, 3):
        write(first, step)
    assert names(tmp_path) == ["global_step_2", "global_step_3", LATEST_FILE]
    write(CheckpointStore(tmp_path, most=2), 4)
    assert names(tmp_path) == ["global_step_3", "global_step_4", LATEST_FILE]


def test_a_checkpoint_of_an_older_run_is_never_newer(tmp_path: Path) -> None:
    write(CheckpointStore(tmp_path, None), 100)
    anew = CheckpointStore(tmp_path, most=1)
    write(anew, 5)
    assert [path.name for path in anew.newest_first()] == ["global_step_5"]


def test_the_same_step_of_an_older_run_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, None)
    write(store, 5, "old")
    write(store, 5, "new")
    assert names(tmp_path) == ["global_step_5", LATEST_FILE]
    assert content(tmp_path / "global_step_5") == "new"


def test_folders_copied_from_elsewhere_are_ordered_by_step(tmp_path: Path) -> None:
    for name in ("global_step_9", "global_step_10", "global_step_x", "global_step_11.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_12").write_text("a file")
    assert [path.name for path in CheckpointStore(tmp_path, None).newest_first()] == [
        "global_step_10",
        "global_step_9",
    ]


CALLS = ("fsync", "rename", "replace", "rmtree")


@pytest.mark.parametrize("step", [2, 3])
def test_a_crash_at_any_call_leaves_a_complete_checkpoint(tmp_path: Path, step: int) -> None:
    """Commit ``step`` over checkpoints 1 and 2, stopped before the first, second, ... call that touches the
    disk."""

    class CrashError(BaseException):
        pass

    def commit_until(call_number: int, folder: Path) -> bool:
        store = CheckpointStore(folder, most=1)
        for old in (1, 2):
            write(CheckpointStore(folder, None), old, f"old {old}")
        (store.begin(step) / "actor").mkdir()
        (folder / f"global_step_{step}.partial" / "actor" / "weights").write_text("new")
        seen = 0

        def crashing(function: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                nonlocal seen
                if seen == call_number:
                    raise CrashError
                seen += 1
                return function(*arguments, **options)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                module = shutil if name == "rmtree" else os
                patch.setattr(module, name, crashing(getattr(module, name)))
            try:
                store.commit(step)
            except CrashError:
                return True
        return False

    crashed, call_number, outcomes = True, 0, []
    while crashed:
        folder = tmp_path / str(call_number)
        crashed = commit_until(call_number, folder)
        store = CheckpointStore(folder, most=1)
        chosen, messages = store.choose("auto", None, readable)
        assert chosen is not None
        assert messages == []
        assert (folder / f"global_step_{(folder / LATEST_FILE).read_text().strip()}").is_dir()
        outcomes.append(content(chosen))
        write(store, 7)
        assert names(folder) == ["global_step_7", LATEST_FILE], f"after a crash at call {call_number}"
        call_number += 1
    switch = outcomes.index("new")
    assert set(outcomes[:switch]) == {"old 2"}
    assert set(outcomes[switch:]) == {"new"}
    assert switch >= 4  # three folders and files are on the disk before the name changes
    assert len(outcomes) - switch >= 5


@pytest.mark.parametrize(
    ("sealed", "whole", "found"), [(True, True, 2), (True, False, 1), (False, True, 1), (False, False, 1)]
)
def test_what_was_sealed_counts_once_it_is_whole(
    tmp_path: Path, sealed: bool, whole: bool, found: int
) -> None:
    """A run that died while, or after, its shards were written beside it."""
    store = CheckpointStore(tmp_path, most=1)
    write(store, 1)
    folder = store.begin(2)
    assert store.begun == 2
    (folder / "run_state").write_text("x")
    if sealed:
        store.seal(2)
        store.seal(2)
    if whole:
        (folder / "weights").write_text("x")

    def problem(folder: Path) -> str | None:
        return None if (folder / "weights").exists() or folder.name == "global_step_1" else "no weights"

    store.close()  # its process has ended
    resumed = CheckpointStore(tmp_path, most=1)
    assert resumed.choose("auto", None, problem) == (tmp_path / f"global_step_{found}", [])
    assert names(tmp_path) == [f"global_step_{found}", LATEST_FILE]
    assert (tmp_path / LATEST_FILE).read_text() == f"{found}\n"
    assert resumed.begun is None


def test_a_new_run_does_not_take_what_an_older_one_sealed(tmp_path: Path) -> None:
    older = CheckpointStore(tmp_path, None)
    older.begin(2)
    older.seal(2)
    older.close()  # its process has ended
    anew = CheckpointStore(tmp_path, None)
    assert anew.choose("disable", None, readable) == (None, [])
    write(anew, 1)
    assert names(tmp_path) == ["global_step_1", LATEST_FILE]


def test_a_seal_is_the_last_thing_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, None)
    folder = store.begin(2)
    for name in ("run_state.json", "data.pt"):
        (folder / name).write_text("x")
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert (
            path.name == "global_step_2.partial"
            or (path.name == "commit_number") == (folder / "commit_number").exists()
        )
        synced.append(path.name)

    monkeypatch.setattr(os, "fsync", fsync)
    store.seal(2)
    assert sorted(synced[:2]) == ["data.pt", "run_state.json"]
    assert synced[2:] == ["commit_number", "global_step_2.partial"]


def test_a_checkpoint_in_writing_is_no_leftover_for_another_store(tmp_path: Path) -> None:
    """One of this process; another process is refused by the same claim."""
    store = CheckpointStore(tmp_path, None)
    (store.begin(2) / "actor").mkdir()
    (tmp_path / "global_step_2.partial" / "actor" / "weights").write_text("2")
    other = CheckpointStore(tmp_path, None)
    for action in (lambda: other.begin(3), lambda: other.choose("auto", None, readable)):
        with pytest.raises(FolderTakenError):
            action()
    assert content(store.commit(2)) == "2"
    assert other.choose("auto", None, readable) == (tmp_path / "global_step_2", [])
    assert names(tmp_path) == ["global_step_2", LATEST_FILE]
    assert not (tmp_path / OWNER_FILE).exists()


def test_a_store_that_has_lost_its_folder_changes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, most=1)
    write(store, 1)
    (store.begin(2) / "actor").mkdir()
    (tmp_path / OWNER_FILE).write_text("of another run")
    before = names(tmp_path)
    for action in (store.seal, store.commit, store.begin):
        with pytest.raises(FolderLostError):
            action(2)
    assert names(tmp_path) == before


def test_a_half_deleted_checkpoint_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, most=1)
    write(store, 1)

    def half(folder: Path, ignore_errors: bool) -> None:
        if folder.exists():
            (folder / "actor" / "weights").unlink()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        write(store, 2)
    assert [path.name for path in store.newest_first()] == ["global_step_2"]


def test_auto_takes_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, None)
    assert store.choose("auto", None, readable) == (None, [])
    write(store, 1)
    write(store, 2)
    store.begin(3)
    assert store.choose("auto", None, readable) == (tmp_path / "global_step_2", [])


def test_auto_passes_over_the_unreadable_and_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, None)
    for step in (1, 2, 3):
        write(store, step)
    chosen, messages = store.choose("auto", None, unreadable("global_step_2", "global_step_3"))
    one, two, three = (tmp_path / f"global_step_{step}" for step in (1, 2, 3))
    assert chosen == one
    assert messages == [
        f"{three} cannot be read (broken); falling back to {one}",
        f"{two} cannot be read (broken); falling back to {one}",
    ]


def test_after_a_fallback_the_next_checkpoint_is_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, None)
    write(store, 10)
    write(store, 20)
    store.choose("auto", None, unreadable("global_step_20"))
    kept = CheckpointStore(tmp_path, most=1)
    write(kept, 15)
    assert names(tmp_path) == ["global_step_15", LATEST_FILE]


def test_auto_never_starts_anew_by_surprise(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, None)
    write(store, 1)
    with pytest.raises(
        CheckpointError, match=r"global_step_1: broken.*start anew with trainer\.resume_mode=disable"
    ):
        store.choose("auto", None, unreadable("global_step_1"))


def test_disable_starts_anew(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, None)
    write(store, 1)
    assert store.choose("disable", None, readable) == (None, [])


def test_resume_path_takes_exactly_that_folder(tmp_path: Path) -> None:
    elsewhere = CheckpointStore(tmp_path / "elsewhere", None)
    one = write(elsewhere, 1)
    write(elsewhere, 2)
    assert CheckpointStore(tmp_path / "run", None).choose("resume_path", str(one), readable) == (one, [])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (None, "got null"),
        ("nowhere", "there is no folder '.*nowhere'"),
        ("global_step_2.partial", "was never finished"),
        ("empty", r"cannot \(no weights\)"),
    ],
)
def test_a_wrong_resume_path(tmp_path: Path, path: str | None, said: str) -> None:
    store = CheckpointStore(tmp_path, None)
    write(store, 1)
    store.begin(2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        CheckpointError, match=f"trainer.resume_mode=resume_path needs trainer.resume_from_path.*{said}"
    ):
        store.choose("resume_path", None if path is None else str(tmp_path / path), readable)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the operating system was asked to write down, by name, in order."""
    found: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
    )
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
