"""Files of folders that somebody else writes: no link leaves them, nothing planted is overwritten."""

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from verl_rc.config.files import RefusedFileError, open_inside, whole_or_absent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/secret").write_text("secret")
    folder = tmp_path / "run"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/file").write_text("ours")
    return folder


def read(folder: Path | None, path: Path) -> str:
    with open_inside(folder, path) as file:
        return file.read().decode()


@pytest.mark.parametrize("target", ["inner/file", "inner/../inner/file", "./inner/file", "link2"])
def test_links_within_the_folder_are_followed(folder: Path, target: str) -> None:
    (folder / "link2").symlink_to(folder / "inner" / "file")
    (folder / "link").symlink_to(target)
    (folder / "folder").symlink_to("inner")
    assert read(folder, folder / "link") == "ours"
    assert read(folder, folder / "folder" / "file") == "ours"
    (folder.parent / "alias").symlink_to(folder)
    assert read(folder.parent / "alias", folder.parent / "alias" / "link") == "ours"


@pytest.mark.parametrize(
    "target", ["../secret", "{}/secret", "../run/../secret", "hop", "out/secret", ".", "/"]
)
def test_links_out_of_the_folder_are_refused(folder: Path, target: str) -> None:
    (folder / "hop").symlink_to("../secret")
    (folder / "out").symlink_to("../beside")
    (folder / "link").symlink_to(target.format(folder.parent))
    for path in (folder / "link", folder / "out" / "secret", folder / "inner" / ".." / ".." / "secret"):
        with pytest.raises(RefusedFileError):
            read(folder, path)


def test_a_folder_of_the_same_beginning_is_another(folder: Path) -> None:
    (folder.parent / "run2").mkdir()
    (folder.parent / "run2/file").write_text("secret")
    (folder / "link").symlink_to("../run2/file")
    with pytest.raises(RefusedFileError, match="leaves"):
        read(folder, folder / "link")


def test_what_the_user_names_may_be_a_link_to_anywhere(folder: Path) -> None:
    (folder / "link").symlink_to("../secret")
    assert read(None, folder / "link") == "secret"


@pytest.mark.parametrize("name", ["pipe", "inner", "socket"])
def test_what_is_no_file_blocks_nobody(folder: Path, name: str) -> None:
    os.mkfifo(folder / "pipe")
    os.mknod(folder / "socket", stat.S_IFSOCK | 0o600)
    for root in (folder, None):
        with pytest.raises(OSError, match=name):
            read(root, folder / name)


def test_absent_files_are_absent(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nothing")
    for name in ("none", "none/file", "dangling"):
        with pytest.raises(FileNotFoundError):
            read(folder, folder / name)
    with pytest.raises(OSError, match="loop"):
        read(folder, folder / "loop")


def test_a_link_that_is_planted_at_any_moment_is_not_followed(folder: Path) -> None:
    """A folder and a link to a private one take turns under one name."""
    ends = threading.Event()

    def take_turns() -> None:
        (folder.parent / "beside" / "file").write_text("secret")
        (folder / "other").symlink_to("../beside")
        while not ends.is_set():
            os.rename(folder / "inner", folder / "kept")
            os.rename(folder / "other", folder / "inner")
            os.rename(folder / "inner", folder / "other")
            os.rename(folder / "kept", folder / "inner")

    thread = threading.Thread(target=take_turns)
    thread.start()
    texts = set()
    try:
        for _ in range(3000):
            try:
                texts.add(read(folder, folder / "inner" / "file"))
            except OSError:
                continue
    finally:
        ends.set()
        thread.join()
    assert texts <= {"ours"}


def test_a_written_file_is_whole_or_absent(folder: Path) -> None:
    path = folder / "page"
    with suppress(ZeroDivisionError), whole_or_absent(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert sorted(os.listdir(folder)) == ["inner"]
    with whole_or_absent(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert sorted(os.listdir(folder)) == ["inner", "page"]


def test_a_written_file_replaces_a_link_and_follows_none(folder: Path) -> None:
    (folder / "page").symlink_to("../secret")
    for name in (f".page.{os.getpid()}.partial", "page.partial", ".page.partial"):
        (folder / name).symlink_to("../secret")
    with whole_or_absent(folder / "page") as file:
        file.write(b"whole")
    assert (folder / "page").read_bytes() == b"whole"
    assert not (folder / "page").is_symlink()
    assert (folder.parent / "secret").read_text() == "secret"


def test_permissions_are_those_of_the_umask(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        with whole_or_absent(folder / "page"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "page").stat().st_mode) == 0o640


def test_no_name_comes_twice_and_none_is_opened_that_exists(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, true = [], Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: (names.append((path, mode)), true(path, mode))[1])
    for _ in range(50):
        with whole_or_absent(folder / "page"):
            pass
    assert len({path for path, _ in names}) == 50
    assert {mode for _, mode in names} == {"xb"}
