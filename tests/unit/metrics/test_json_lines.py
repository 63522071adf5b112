"""Lines that a killed run left behind: half of the last one goes, damage is named, all others stay."""

import json
import logging
from pathlib import Path

import pytest

from verl_rc.metrics.json_lines import set_aside

TEXT = 'é数🙂\ud83d\x00\\"\n'
"""Characters of two to four bytes, half a pair, and those that JSON escapes."""
FIRST, LAST = (
    (json.dumps({"step": step, "text": TEXT}, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
    for step in (1, 2)
)


def lines_of(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def test_a_line_that_is_cut_anywhere_moves_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    for cut in range(1, len(LAST)):
        path.write_bytes(FIRST + LAST[:cut])
        set_aside(path)
        assert path.read_bytes() == FIRST
        assert lines_of(tmp_path / "metrics.replaced.jsonl") == LAST[:cut] + b"\n"
        (tmp_path / "metrics.replaced.jsonl").unlink()
    assert caplog.records == []


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 5000, b"\xff\xfe{", LAST[:9] + b"\0" * 40, b" ", b"\r"])
def test_bytes_that_a_power_cut_left_at_the_end_move_aside(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(FIRST + tail)
    set_aside(path)
    assert path.read_bytes() == FIRST


@pytest.mark.parametrize(
    "damage",
    [b"\0\0\0\n", b"\0\0" + LAST, LAST[:9] + LAST, b"\xc3\n", b"[1]\n", b"\n", b"[" * 100_000 + b"\n"],
)
def test_damage_in_the_middle_is_named_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(FIRST + damage + LAST)
    set_aside(path)
    assert path.read_bytes() == FIRST + LAST
    assert lines_of(tmp_path / "metrics.replaced.jsonl") == damage
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"{path}: damaged, moved to metrics.replaced.jsonl: line 2"


def test_a_file_without_damage_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(FIRST + LAST)
    before = path.stat()
    set_aside(path)
    assert path.stat() == before
    assert [path.name] == [path.name for path in tmp_path.iterdir()]
    set_aside(tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


def test_what_only_its_owner_may_read_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "pieces.jsonl"
    path.write_bytes(FIRST + LAST[:5])
    path.chmod(0o600)
    set_aside(path)
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "pieces.jsonl": 0o600,
        "pieces.replaced.jsonl": 0o600,
    }
