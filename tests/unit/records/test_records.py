"""Rows of three formats read alike, of a user's class too, and every kind of broken file is named."""

import json

import pytest

from verl_rc.config.task import DataConfig
from verl_rc.records.dataset import PromptDataset, build_train_loader, build_validation_rows
from verl_rc.records.records import RecordFile, check_messages

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
    assert [file[i] for i in range(len(file))] == [
        {"prompt": "a", "extra": 1},
        {"prompt": "b", "extra": None},
    ]


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


def test_a_null_field_of_a_message_is_absent():
    messages = [{"role": "user", "content": "x", "tool_calls": None}]
    assert check_messages(messages, "prompt", "row 0") == [{"role": "user", "content": "x"}]


UNLIKE = [
    3,
    2.5,
    10**30,
    True,
    "3",
    None,
    [1, 2],
    [0.5, None, "x"],
    [],
    {},
    {"f(1)": "1"},
    {"g": {"h": [{}]}},
]
"""Values that no Arrow type holds together."""


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_row_of_json_is_what_is_written_there(suffix, record, tokenizer, tmp_path):
    written = [
        record(
            str(number), reward_model={"ground_truth": value}, extra_info={"of": value, f"key{number}": value}
        )
        for number, value in enumerate(UNLIKE)
    ]
    text = json.dumps(written) if suffix == "json" else "\n".join(map(json.dumps, written))
    (tmp_path / f"data.{suffix}").write_text(text)
    path = str(tmp_path / f"data.{suffix}")
    for rows in (
        build_validation_rows(options_of(path), tokenizer),
        PromptDataset([path], tokenizer, options_of(path)),
    ):
        read = [(rows[index].ground_truth, rows[index].extra_info) for index in range(len(UNLIKE))]
        assert repr(read) == repr(
            [(row["reward_model"]["ground_truth"], row["extra_info"]) for row in written]
        )


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def chat(*calls, **fields):
    return [{"role": "assistant", "content": "", "tool_calls": list(calls), **fields}]


CHATS = [
    chat(call("weather", {"city": "Oslo"}), name="a"),
    chat(call("sum", {"numbers": [1, 2], "of": [{"x": 1}, {"y": {"z": "2"}}]}), call("nothing", {})),
    [{"role": "user", "content": "x"}],
]


@pytest.mark.parametrize("prompt_key", ["prompt", "chat"])
def test_what_parquet_adds_to_messages_is_taken_out_at_every_depth(prompt_key, write_parquet):
    path = write_parquet([{prompt_key: chat, "other": {str(row): "x"}} for row, chat in enumerate(CHATS)])
    file = RecordFile(path, [prompt_key, "other"], messages=prompt_key)
    assert [file[index][prompt_key] for index in range(3)] == [row[prompt_key] for row in file] == CHATS
    assert file.column("other") == [
        {"0": "x", "1": None, "2": None},
        {"0": None, "1": "x", "2": None},
        {"0": None, "1": None, "2": "x"},
    ]


def test_a_null_that_a_line_gives_to_an_argument_is_one(tmp_path):
    messages = chat(call("weather", {"city": None}))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    [row] = RecordFile(str(tmp_path / "rows.jsonl"), ["messages"], messages="messages")
    assert check_messages(row["messages"], "messages", "row 0") == messages


def test_what_is_done_to_a_row_is_not_done_to_the_next_reading(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"extra": {"seen": []}}')
    file = RecordFile(str(tmp_path / "rows.jsonl"), ["extra"])
    file[0]["extra"]["seen"].append(1)
    assert file[0] == {"extra": {"seen": []}}


def test_a_map_of_parquet_is_a_mapping(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"extra": column}), tmp_path / "rows.parquet")
    assert RecordFile(str(tmp_path / "rows.parquet"), ["extra"]).column("extra") == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "9"}, "must hold a list of chat messages .* in row 1 of"),
        (
            {"data_source": None},
            "column 'data_source' must hold a value in every row, but row 1 of .* has none",
        ),
        (
            {"reward_model": "9"},
            "column 'reward_model' must hold .*'ground_truth': ...}, got '9' in row 1 of",
        ),
        ({"reward_model": {"style": "rule"}}, "column 'reward_model' must hold .* in row 1 of"),
        ({"extra_info": ["9"]}, "column 'extra_info' must hold a mapping .* in row 1 of"),
    ],
)
def test_a_line_unlike_the_others_is_named_at_the_start(changes, message, record, tokenizer, tmp_path):
    lines = [record("1"), record("9", **changes), record("2")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    path = str(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=message):
        PromptDataset([path], tokenizer, options_of(path))


@pytest.mark.parametrize(
    "bad", ["text", [], None, ["text"], [{"role": "user"}], [{"role": "user", "content": ["x"]}]]
)
def test_what_is_no_list_of_messages_is_refused(bad):
    with pytest.raises(
        ValueError, match=r"column 'prompt' must hold a list of chat messages.*in row 3 of f\.parquet"
    ):
        check_messages(bad, "prompt", "row 3 of f.parquet")


def test_a_column_is_read_row_by_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1, "b": "x"}\n{"a": 2, "b": null}\n')
    assert RecordFile(str(tmp_path / "rows.jsonl"), ["a", "b"]).column("b") == ["x", None]


def test_columns_that_the_first_record_lacks_are_kept(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b", "extra": {"x": 1}}\n')
    file = RecordFile(str(tmp_path / "rows.jsonl"), ["prompt"], ["extra"])
    assert [file[0], file[1]] == [{"prompt": "a", "extra": None}, {"prompt": "b", "extra": {"x": 1}}]


def test_a_text_may_hold_unicodes_own_line_ends(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert RecordFile(str(tmp_path / "rows.jsonl"), ["prompt"])[0] == {"prompt": "a\u2028b\x85c"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"could not be read: line 2 is not JSON"),
        ("rows.jsonl", '{"prompt": "a"}\n"b"\n', r"line 2 is no record but 'b'"),
        ("rows.jsonl", '{"prompt": "\\ud83d"}\n', r"must be readable, got .* surrogates not allowed"),
        ("rows.json", '{"prompt": "a"}', r"it holds no list but dict"),
        ("rows.json", "[" * 100_000, r"the file is not JSON: maximum recursion depth"),
    ],
)
def test_a_broken_record_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        RecordFile(str(tmp_path / name), ["prompt"])


def test_damaged_parquet_is_named(write_parquet):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write_parquet(ROWS)
    table = pq.read_table(path)
    pq.write_table(table.append_column("prompt", table.column("prompt")), path)
    with pytest.raises(
        ValueError, match=r"data.parquet could not be read: Multiple matches for FieldRef.Name\(prompt\)"
    ):
        RecordFile(path, ["prompt"])
    pq.write_table(pa.table({"prompt": pa.array([b"fine", b"\xff"]).view(pa.string())}), path)
    with pytest.raises(ValueError, match=r"columns of .*data.parquet must be readable, got .*UTF8"):
        RecordFile(path, ["prompt"])


def messages(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "bad", [None, [], messages(None), [*messages("x"), None], [{"role": None, "content": "x"}]]
)
@pytest.mark.parametrize("rows_per_chunk", [2, 100])
def test_the_first_row_without_messages_is_named_wherever_it_stands(
    bad, rows_per_chunk, write_parquet, record, tokenizer
):
    import pyarrow.parquet as pq

    path = write_parquet([record("", prompt=prompt) for prompt in [*[messages("1")] * 7, bad, []]])
    pq.write_table(pq.read_table(path), path, row_group_size=rows_per_chunk)
    with pytest.raises(
        ValueError, match=r"column 'prompt' must hold a list of chat messages .* in row 7 of "
    ):
        PromptDataset([path], tokenizer, options_of(path))


SOURCE = """
class Squares:
    def __init__(self, data_files, tokenizer, processor, config):
        self.name = data_files[0]
        self.limit = config.max_prompt_length
    def __len__(self):
        return 9
    def __getitem__(self, index):
        return {KEY: [{"role": "user", "content": str(index) * (9 if index == 8 else 1)}], "data_source": self.name,
                "reward_model": {"ground_truth": str(index**2)}}
"""  # noqa: E501


@pytest.fixture
def config(tmp_path):
    def build(source, name="Squares", **changes):
        (tmp_path / "own.py").write_text(source)
        own = {"path": str(tmp_path / "own.py"), "name": name}
        given = {
            "train_files": ["t"],
            "val_files": ["v"],
            "train_batch_size": 4,
            "gen_batch_size": 4,
            "max_prompt_length": 4,
        }
        given |= {"seed": 1, "filter_overlong_prompts": True, "custom_cls": own, **changes}
        return DataConfig.model_validate(given)

    return build


@pytest.mark.parametrize("key", ["'prompt'", "'raw_prompt'"])
def test_rows_are_tokenised_filtered_and_batched(key, config, tokenizer):
    options = config(SOURCE.replace("KEY", key))
    loader = build_train_loader(options, tokenizer)
    assert loader.dataset.data_sources() == {"t": f"row 0 of Squares of {options.custom_cls.path}"}
    rows = [row for batch in loader for row in batch]
    assert sorted((tokenizer.decode(row.prompt_token_ids), row.ground_truth) for row in rows) == [
        (f"{i}=", str(i * i)) for i in range(8)
    ]
    assert {row.data_source for row in rows} == {"t"}
    assert {row.data_source for row in build_validation_rows(options, tokenizer)} == {"v"}


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (SOURCE, "Cubes", r"must name a class of .*own.py, got 'Cubes'; it has \['Squares'\]"),
        ("import nothing_of_this_name", "Squares", "can be imported; .*ModuleNotFoundError"),
        (SOURCE.replace("__getitem__", "get").replace("KEY", "'prompt'"), "Squares", "lacks one of them"),
        (
            SOURCE.replace("return 9", "return 0").replace("KEY", "'prompt'"),
            "Squares",
            r"at least one row for \['t'\]",
        ),
        (SOURCE.replace("KEY", "'question'"), "Squares", r"row 0 lacks \['prompt'\]; it is \{'question'"),
    ],
)
def test_a_wrong_class_is_named(source, name, message, config, tokenizer):
    with pytest.raises(ValueError, match=message):
        build_train_loader(config(source, name), tokenizer)


@pytest.mark.parametrize(
    "value", ["lambda: 1", "threading.Lock()", "(n for n in [1])", "type('C', (), {})()"]
)
def test_a_row_that_no_other_process_can_get_is_named(value, config, tokenizer):
    source = "import threading\n" + SOURCE.replace("KEY", "'prompt'").replace(
        '"data_source":', f'"extra_info": {{"rule": {value}}}, "tokenizer": (lambda: 1), "data_source":'
    )
    with pytest.raises(ValueError, match=r"values that can be pickled, .* 'extra_info' of row 0 raised"):
        build_train_loader(config(source), tokenizer)


def test_its_data_sources_are_found(config, tokenizer):
    loader = build_train_loader(config(SOURCE.replace("KEY", "'prompt'")), tokenizer)
    assert loader.dataset.data_sources() == {"t": f"row 0 of Squares of {config(SOURCE).custom_cls.path}"}


VERIFIERS = [
    {"question": "2 + 2", "answer": "4", "info": '{"steps": [1]}', "task": "sums"},
    {"question": "3 + 3", "answer": "6", "info": "", "task": None},
]


def test_a_file_of_verifiers_is_read_as_one_of_verl(write_parquet, tokenizer):
    """Its columns as the package's documents describe them: question or prompt, answer, info, task."""
    path = write_parquet([*VERIFIERS])
    first, second = build_validation_rows(options_of(path), tokenizer)
    assert first.messages == [{"role": "user", "content": "2 + 2"}]
    assert (first.ground_truth, first.data_source, first.extra_info) == ("4", "sums", {"steps": [1]})
    assert (second.ground_truth, second.data_source, second.extra_info) == ("6", "verifiers", {})


def test_a_row_of_a_file_of_verifiers_names_its_environment(write_parquet, tokenizer):
    path = write_parquet([{**VERIFIERS[0], "agent_name": "chess"}, VERIFIERS[1]])
    assert [row.agent_name for row in build_validation_rows(options_of(path), tokenizer)] == ["chess", None]


def test_messages_of_a_file_of_verifiers_win_over_its_question(write_parquet, tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    path = write_parquet([{"prompt": messages, "question": "?", "answer": "4", "info": {"a": 1}}])
    (row,) = build_validation_rows(options_of(path), tokenizer)
    assert (row.messages, row.extra_info) == (messages, {"a": 1})


def test_what_lacks_in_a_file_of_verifiers_is_named(write_parquet, tokenizer):
    with pytest.raises(ValueError, match=r"lacks \['question'\]"):
        build_validation_rows(options_of(write_parquet([{"answer": "4", "task": "t"}])), tokenizer)
    path = write_parquet([{"question": "q", "answer": "4"}, {"question": None, "answer": "5"}])
    with pytest.raises(ValueError, match=r"must hold a list of chat messages .* in row 1 of"):
        PromptDataset([path], tokenizer, options_of(path))
    path = write_parquet([{"question": "q", "answer": "4", "info": "{"}])
    with pytest.raises(ValueError, match=r"'info' must hold a mapping, .*row 0 of"):
        build_validation_rows(options_of(path), tokenizer)


def options_of(path):
    return DataConfig(train_files=[path], val_files=[path], seed=1, gen_batch_size=1)


@pytest.mark.parametrize("name", ["images", "image", "videos", "audios", "multi_modal_data"])
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_row_with_more_than_text_is_refused_at_the_start(
    name, suffix, write_parquet, record, tokenizer, tmp_path
):
    """Also where only a later row has one: the rows before it hold nothing."""
    rows = [record("1", **{name: None}), record("2", **{name: ["picture.png"]})]
    if suffix == "parquet":
        path = write_parquet(rows)
    else:
        path = str(tmp_path / "data.jsonl")
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        ValueError, match=rf"'{name}' in row 1 of .* is refused and must be empty: images, video and audio"
    ):
        PromptDataset([path], tokenizer, options_of(path))
    (tmp_path / "sft.jsonl").write_text(json.dumps({"messages": [], name: [1]}))
    with pytest.raises(ValueError, match=rf"'{name}' in row 0 of .*sft.jsonl is refused"):
        RecordFile(str(tmp_path / "sft.jsonl"), ["messages"])


@pytest.mark.parametrize("empty", [None, []])
def test_a_column_of_images_without_any_is_no_obstacle(empty, write_parquet, record, tokenizer):
    path = write_parquet([record("1", images=empty), record("2", images=empty)])
    assert len(PromptDataset([path], tokenizer, options_of(path))) == 2


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("tools", [{"type": "function"}], "multi_turn.tools"),
        ("enable_thinking", False, "data.apply_chat_template_kwargs"),
        ("chat_template_kwargs", {"enable_thinking": False}, "data.apply_chat_template_kwargs"),
    ],
)
def test_a_column_that_would_change_the_prompt_is_refused(name, value, instead, write_parquet, record):
    with pytest.raises(
        ValueError, match=rf"'{name}' in row 0 of .* is refused and must be empty: .*{instead}"
    ):
        RecordFile(write_parquet([record("1", **{name: value})]), ["prompt"])


def test_a_message_with_an_image_beside_its_text_is_refused():
    messages = [{"role": "user", "content": "<image>how many?", "images": ["picture.png"]}]
    with pytest.raises(ValueError, match="'images' in a message of column 'prompt' in row 0 is refused"):
        check_messages(messages, "prompt", "row 0")


def test_a_row_of_a_users_class_with_an_image_is_refused(tmp_path, record, tokenizer):
    row = {**record("1"), "multi_modal_data": {"image": [0]}}
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    def __init__(self, data_files, tokenizer, processor, config): ...\n"
        "    def __len__(self): return 1\n"
        f"    def __getitem__(self, index): return {row!r}\n"
    )
    own = {"path": str(tmp_path / "own.py"), "name": "Own"}
    data = DataConfig.model_validate({**options_of("unused").model_dump(), "custom_cls": own})
    with pytest.raises(ValueError, match=r"'multi_modal_data' in row 0 of Own of .* is refused"):
        PromptDataset([], tokenizer, data)


def test_columns_that_are_not_read_are_named(write_parquet, record, tokenizer):
    path = write_parquet([record("1", split="train")])
    assert PromptDataset([path], tokenizer, options_of(path)).unread_columns() == ["ability", "split"]
