"""Data files: three formats read alike, and every kind of broken file is named."""

import json

import pytest

from verl_rc.data.records import RecordFile, check_messages

ROWS = [{"prompt": "a", "extra": 1, "unused": True}, {"prompt": "b", "extra": None, "unused": False}]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_formats_read_alike(suffix, write_parquet, tmp_path):
    if suffix == "parquet":
        path = write_parquet(ROWS)
    else:
        text = json.dumps(ROWS) if suffix == "json" else "\n".join(map(json.dumps, ROWS)) + "\n"
        path = str(tmp_path / f"data.{suffix}")
        (tmp_path / f"data.{suffix}").write_text(text)
    file = RecordFile(path, ["prompt"], ["extra", "absent"])
    assert [file[i] for i in range(len(file))] == [{"prompt": "a", "extra": 1}, {"prompt": "b", "extra": None}]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"must exist, but .*none.parquet' is not there.*data.train_files"):
        RecordFile(str(tmp_path / "none.parquet"), ["prompt"])
    with pytest.raises(ValueError, match="is a folder"):
        RecordFile(str(tmp_path), ["prompt"])


def test_missing_column_is_named_with_those_there(write_parquet):
    with pytest.raises(ValueError, match=r"lacks \['question'\]; it has \['prompt', 'extra', 'unused'\]"):
        RecordFile(write_parquet(ROWS), ["prompt", "question"])


def test_empty_file_is_named(write_parquet, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"at least one row, but .*empty.parquet has none"):
        RecordFile(str(tmp_path / "empty.parquet"), ["prompt"])


@pytest.mark.parametrize("name", ["bad.parquet", "bad.jsonl", "bad.json"])
def test_unreadable_file_is_named(name, tmp_path):
    (tmp_path / name).write_text('{"prompt": ')
    with pytest.raises(ValueError, match=f"{name} could not be read"):
        RecordFile(str(tmp_path / name), ["prompt"])


def test_gaps_that_arrow_fills_are_taken_out_of_messages():
    messages = [{"role": "user", "content": "x", "tool_calls": None}]
    assert check_messages(messages, "prompt", "row 0") == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("bad", ["text", [], None, ["text"], [{"role": "user"}], [{"role": "user", "content": ["x"]}]])
def test_what_is_no_list_of_messages_is_refused(bad):
    with pytest.raises(ValueError, match=r"column 'prompt' must hold a list of chat messages.*in row 3 of f\.parquet"):
        check_messages(bad, "prompt", "row 3 of f.parquet")


def test_a_column_is_read_row_by_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1, "b": "x"}\n{"a": 2, "b": null}\n')
    assert RecordFile(str(tmp_path / "rows.jsonl"), ["a", "b"]).column("b") == ["x", None]
