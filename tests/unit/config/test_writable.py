"""Folders that cannot be written to are found before a run starts, and nothing is left where one can be."""

import errno
import os
import tempfile

import pytest

from verl_rc.config import checks


@pytest.fixture
def read_only(monkeypatch):
    """What a mount without write access answers; permissions alone would not stop root."""

    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)


def test_a_folder_that_is_there_or_can_be_made_has_no_problem(tmp_path):
    assert checks.why_unwritable(tmp_path) is None
    assert checks.folder_problem("trainer.output_dir", str(tmp_path / "new" / "run")) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_nobody_named_has_no_problem(read_only):
    assert checks.folder_problem("trainer.rollout_data_dir", None) is None


def test_a_read_only_folder_is_named_with_its_key_the_reason_and_what_to_do(tmp_path, read_only):
    assert checks.folder_problem("trainer.output_dir", str(tmp_path / "run")) == (
        f"trainer.output_dir must be a folder that can be written to, got {str(tmp_path / 'run')!r} "
        f"({tmp_path}: Read-only file system). Pass another one: trainer.output_dir=<folder>."
    )


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").touch()
    assert checks.why_unwritable(tmp_path / "file" / "run") == f"{tmp_path / 'file'}: Not a directory"


@pytest.mark.skipif(os.getuid() == 0, reason="permissions do not stop root")
def test_a_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o555)
    assert checks.why_unwritable(tmp_path / "run") == f"{tmp_path}: Permission denied"


def test_the_nearest_parent_that_exists(tmp_path):
    assert checks.first_existing(tmp_path / "a" / "b") == tmp_path
    assert checks.first_existing(tmp_path) == tmp_path
