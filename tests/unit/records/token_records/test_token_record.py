"""Token records: what is written is read back, damaged files are named, and the folder stays within its
limits."""

import json
import random
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from recorded_tokens import token_record

from verl_rc.records.parquet_sizes import sizes_of
from verl_rc.records.token_records.token_parquet import (
    read_facts,
    read_record,
    record_files,
    record_path,
    set_aside_later,
    thin_out,
    write_record,
)
from verl_rc.records.token_records.token_record import TOKEN_CLASSES, DamagedRecordError, class_of


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


def bomb(path: Path, count: int, texts: str = "") -> Path:
    """One row of ``count`` tokens that are all the same: a few hundred bytes."""
    tokens = pa.ListArray.from_arrays(pa.array([0, count], "int32"), pa.array(np.zeros(count, "int8")))
    table = pa.table({"response_mask": tokens, "rollout_log_prob": tokens, "source": [texts]})
    facts = {b"token_record": json.dumps({"token_record": 1, "step": 1, "trainer": "x"}).encode()}
    parquet.write_table(
        table.replace_schema_metadata(facts), path, compression="zstd", data_page_size=1 << 30
    )
    return path


def with_a_lying_footer(path: Path, count: int) -> None:
    """The footer says that its columns have three values; their pages have ``count``."""
    data = path.read_bytes()
    (length,) = struct.unpack("<I", data[-8:-4])
    body, footer = data[: -8 - length], data[-8 - length : -8]
    true = bytes((2 * count >> shift & 127) | 128 for shift in (0, 7, 14)) + bytes([2 * count >> 21])
    assert footer.count(true) == 4  # two columns, and statistics
    path.write_bytes(body + footer.replace(true, bytes([134, 128, 128, 0])) + data[-8:])


def test_a_file_that_unfolds_to_far_more_than_its_size_is_refused(tmp_path: Path) -> None:
    count = 3_000_000
    path = bomb(tmp_path / "step_000001.parquet", count)
    assert path.stat().st_size < 5_000
    with pytest.raises(DamagedRecordError, match=r"unfold to 6,000,004 values .* at most 1,048,576 are read"):
        read_record(path)
    with_a_lying_footer(path, count)
    assert parquet.read_metadata(path).row_group(0).column(0).num_values == 3
    with pytest.raises(DamagedRecordError, match="unfold to 6,000,004 values"):
        read_record(path)
    with pytest.raises(DamagedRecordError, match="unfold"):
        read_facts(path)


def test_a_page_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path: Path) -> None:
    path = bomb(tmp_path / "step_000001.parquet", 3, texts="x" * (40 << 20))
    assert path.stat().st_size < 10_000
    with pytest.raises(DamagedRecordError, match=r"values of 4\d,\d{3},\d{3} bytes"):
        read_record(path)


def test_texts_that_share_their_beginnings_are_refused(tmp_path: Path) -> None:
    table = parquet.read_table(write_record(tmp_path, token_record(1)))
    texts = pa.array(["x" * 1000 + str(row) for row in range(len(table))])
    table = table.set_column(table.schema.get_field_index("source"), "source", texts)
    path = tmp_path / "step_000001.parquet"
    parquet.write_table(table, path, use_dictionary=False, column_encoding={"source": "DELTA_BYTE_ARRAY"})
    with pytest.raises(DamagedRecordError, match="texts that unfold without bound"):
        read_record(path)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_sizes_are_those_of_the_footer_where_it_tells_the_truth(
    tmp_path: Path, version: str, compression: str
) -> None:
    table = parquet.read_table(write_record(tmp_path, token_record(1)))
    path = tmp_path / "other.parquet"
    table = pa.concat_tables([table] * 500)
    parquet.write_table(
        table,
        path,
        compression=compression,
        data_page_version=version,
        data_page_size=500,
        row_group_size=400,
    )
    metadata = parquet.read_metadata(path)
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(metadata.num_columns)]
    with path.open("rb") as file:
        sizes = sizes_of(file, metadata)
    of_data = sum(column.num_values for column in columns)
    assert of_data <= sizes.values < 1.5 * of_data  # and those of dictionaries
    # A footer counts the headers of pages as well.
    assert sizes.num_bytes <= sum(column.total_uncompressed_size for column in columns) < 3 * sizes.num_bytes


def test_damaged_pages_are_damaged_records(tmp_path: Path) -> None:
    path = write_record(tmp_path, token_record(1))
    whole, numbers = path.read_bytes(), random.Random(7)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(numbers.randrange(1, 6)):
            data[numbers.randrange(len(data))] = numbers.randrange(256)
        path.write_bytes(data)
        with suppress(DamagedRecordError):
            read_record(path)
