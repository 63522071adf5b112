"""Token records: what is written is read back, damaged files are named, and the folder stays within its
limits."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from recorded_tokens import token_record

from verl_rc.data.token_parquet import (
    read_facts,
    read_record,
    record_files,
    record_path,
    set_aside_later,
    thin_out,
    write_record,
)
from verl_rc.data.token_record import TOKEN_CLASSES, DamagedRecordError, class_of


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = token_record(
        7, (3, 0, 5), entropy=np.linspace(0, 2, 8), old_log_prob=[-np.inf, np.nan, *[-0.25] * 6]
    )
    read = read_record(write_record(tmp_path, written))
    assert (read.step, read.facts["why"], read.facts["token_record"]) == (7, "regular", 1)
    assert read.lengths.tolist() == [3, 0, 5]
    assert read.starts.tolist() == [0, 3, 3]
    for name, values in written.tokens.items():
        precision = 1e-3 if name == "entropy" else 0.0
        np.testing.assert_allclose(read.tokens[name], values, rtol=precision, err_msg=name)
    for name, values in written.rows.items():
        assert read.rows[name].tolist() == values.tolist(), name
    assert read.prompts is not None
    assert [prompt.tolist() for prompt in read.prompts] == [[11, 1], [11, 2], [11, 3]]


def test_columns_that_were_not_computed_are_left_out(tmp_path: Path) -> None:
    record = token_record(1, old_log_prob=None, response_ids=None, prompts=None)
    read = read_record(write_record(tmp_path, record))
    assert read.prompts is None
    assert read.log_ratio() is None
    assert {"old_log_prob", "response_ids", "ref_log_prob"}.isdisjoint(read.tokens)


def test_log_ratios_are_trainer_less_engine() -> None:
    ratio = token_record(1, (2,), gap=0.5).log_ratio()
    assert ratio is not None
    np.testing.assert_allclose(ratio, [0.5, -0.5], atol=1e-6)


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write_record(tmp_path, token_record(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_killed_run_leaves_whole_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = token_record(1, gap=0.3)
    write_record(tmp_path, first)

    def dies(table: pa.Table, file: object, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parquet, "write_table", dies)
    with pytest.raises(KeyboardInterrupt):
        write_record(tmp_path, token_record(1, gap=0.7))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001.parquet"]
    np.testing.assert_array_equal(
        read_record(record_path(tmp_path, 1)).tokens["old_log_prob"], first.tokens["old_log_prob"]
    )


def rewritten(path: Path, change: str) -> None:
    """The record with one thing changed."""
    table = parquet.read_table(path)
    metadata = dict(table.schema.metadata)
    if change == "version":
        facts = json.loads(metadata[b"token_record"])
        metadata[b"token_record"] = json.dumps({**facts, "token_record": 9}).encode()
        table = table.replace_schema_metadata(metadata)
    if change == "lengths":
        place = table.schema.get_field_index("entropy")
        table = table.set_column(place, "entropy", pa.array([[0.0]] * len(table), pa.list_(pa.float16())))
    if change == "type":
        table = table.set_column(table.schema.get_field_index("row"), "row", pa.array(["x"] * len(table)))
    if change == "gaps":
        place = table.schema.get_field_index("rollout_log_prob")
        gaps = [[None] * len(row) for row in table.column("response_mask").to_pylist()]
        table = table.set_column(place, "rollout_log_prob", pa.array(gaps, pa.list_(pa.float32())))
    if change == "column":
        table = table.drop_columns(["response_mask"])
    if change == "facts":
        table = table.replace_schema_metadata({})
    parquet.write_table(table, path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("version", "version 9 of the record"),
        ("lengths", "differ in length"),
        ("type", "row|string|parse"),
        ("gaps", "rollout_log_prob has gaps"),
        ("column", "no column response_mask"),
        ("facts", "no facts"),
    ],
)
def test_damaged_records_say_why(tmp_path: Path, change: str, why: str) -> None:
    path = write_record(tmp_path, token_record(1))
    rewritten(path, change)
    with pytest.raises(DamagedRecordError, match=why):
        read_record(path)


@pytest.mark.parametrize("kept", [0, 4, 100, 700])
def test_a_cut_off_file_is_damaged(tmp_path: Path, kept: int) -> None:
    path = write_record(tmp_path, token_record(1))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DamagedRecordError):
        read_record(path)


def test_other_columns_and_wider_types_are_no_matter(tmp_path: Path) -> None:
    path = write_record(tmp_path, token_record(1))
    table = parquet.read_table(path).append_column("later", pa.array([1, 2, 3]))
    place = table.schema.get_field_index("row")
    parquet.write_table(table.set_column(place, "row", pa.array([0, 2, 4], pa.int64())), path)
    assert read_record(path).rows["row"].tolist() == [0, 2, 4]


def test_steps_that_a_resumed_run_repeats_are_set_aside(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write_record(tmp_path, token_record(step))
    (tmp_path / ".step_000011.parquet.77.partial").write_bytes(b"half")
    set_aside_later(tmp_path, 2)
    assert [step for step, _ in record_files(tmp_path)] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir())[2:] == ["step_000010.replaced.parquet"]


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    set_aside_later(tmp_path / "none", 3)
    assert record_files(tmp_path / "none") == []


def test_every_second_ordinary_record_goes_first(tmp_path: Path) -> None:
    for step in range(1, 10):
        write_record(tmp_path, token_record(step, why="alert" if step in (2, 3) else "regular"))
    write_record(tmp_path, token_record(20))
    record_path(tmp_path, 20).rename(tmp_path / "step_000020.replaced.parquet")
    assert thin_out(tmp_path, 1 << 30, 8, ["alert"]) == 2
    assert [step for step, _ in record_files(tmp_path)] == [1, 2, 3, 5, 6, 7, 8, 9]
    assert not (tmp_path / "step_000020.replaced.parquet").exists()
    assert thin_out(tmp_path, 1 << 30, 3, ["alert"]) == 5
    assert [step for step, _ in record_files(tmp_path)] == [2, 3, 9]
    assert thin_out(tmp_path, 1, 100, ["alert"]) == 2
    assert [step for step, _ in record_files(tmp_path)] == [9]
    assert read_facts(record_path(tmp_path, 9))["why"] == "regular"


def test_nothing_goes_while_it_fits(tmp_path: Path) -> None:
    for step in range(1, 4):
        write_record(tmp_path, token_record(step))
    assert thin_out(tmp_path, 1 << 20, 3, []) == 0


@pytest.mark.parametrize(
    ("text", "special", "kind"),
    [
        ("<eos>", True, "special"),
        (" 42", False, "digits"),
        ("\n ", False, "whitespace"),
        (" the", False, "word"),
        ("+", False, "punctuation"),
        ("x1", False, "word"),
        ("\ufffd", False, "fragment"),
        ("", False, "fragment"),
    ],
)
def test_kinds_of_tokens(text: str, special: bool, kind: str) -> None:
    assert TOKEN_CLASSES[class_of(text, special)] == kind
