"""Prompts: verl's format in, token ids out; the loader and its stream are seeded and resume exactly; wrong
data is named."""

import json
import shutil

import pytest
from torch.utils.data import DataLoader

from verl_rc.config.task import DataConfig
from verl_rc.records.dataset import (
    EpochBatches,
    PromptDataset,
    PromptStream,
    build_train_loader,
    build_validation_rows,
    describe_lengths,
    evenly_spread,
    select_rows,
)
from verl_rc.records.tokenize import load_tokenizer


def questions(rows):
    return [row.messages[0]["content"] for row in rows]


def config(path, **changes):
    given = {
        "train_files": path,
        "val_files": path,
        "train_batch_size": 2,
        "max_prompt_length": 32,
        **changes,
    }
    return DataConfig.model_validate({"gen_batch_size": given["train_batch_size"], "seed": 1, **given})


def options(**changes):
    return config("unused", **changes)


@pytest.fixture
def ten_rows(write_parquet, record):
    return write_parquet([record(str(10 + i)) for i in range(10)])


def test_a_row_in_verls_format(write_parquet, record, tokenizer):
    path = write_parquet([record("407", data_source="s", extra_info={"index": 7, "question": "q"})])
    row = PromptDataset([path], tokenizer, options())[0]
    assert tokenizer.decode(row.prompt_token_ids) == "407="
    assert (row.row_index, row.data_source, row.ground_truth) == (0, "s", "704")
    assert row.messages == [{"role": "user", "content": "407"}]
    assert row.extra_info == {"index": 7, "question": "q"}


def test_files_with_different_columns_follow_each_other(write_parquet, record, tokenizer):
    bare = {key: value for key, value in record("3").items() if key not in ("extra_info", "ability")}
    first, second = write_parquet([record("1"), record("2")], "a.parquet"), write_parquet([bare], "b.parquet")
    dataset = PromptDataset([first, second], tokenizer, options())
    assert questions(dataset[i] for i in range(len(dataset))) == ["1", "2", "3"]
    assert [dataset[i].row_index for i in range(3)] == [0, 1, 2]
    assert dataset[2].extra_info == {}


def test_a_row_is_found_by_its_index_in_the_files(ten_rows, tokenizer):
    dataset = PromptDataset([ten_rows], tokenizer, options(shuffle=False), 4)
    rows = [dataset[place].row_index for place in range(4)]
    assert [dataset.row(row).row_index for row in rows] == rows
    with pytest.raises(ValueError, match=r"row 10 of data\.train_files, .* is not selected now"):
        dataset.row(10)


def test_prompt_key_names_the_column(write_parquet, record, tokenizer):
    row = record("5")
    path = write_parquet([{**row, "question": row["prompt"], "prompt": "text"}])
    data = options(max_prompt_length=8, prompt_key="question")
    assert questions([PromptDataset([path], tokenizer, data)[0]]) == ["5"]


@pytest.mark.parametrize(("truncation", "kept"), [("left", "345="), ("right", "1234"), ("middle", "125=")])
def test_truncation(truncation, kept, write_parquet, record, tokenizer):
    """ "12345=" has 6 tokens; 4 are kept."""
    data = options(max_prompt_length=4, truncation=truncation)
    row = PromptDataset([write_parquet([record("12345")])], tokenizer, data)[0]
    assert tokenizer.decode(row.prompt_token_ids) == kept


def test_middle_truncation_to_an_odd_length_keeps_one_more_at_the_end(write_parquet, record, tokenizer):
    data = options(max_prompt_length=3, truncation="middle")
    row = PromptDataset([write_parquet([record("12345")])], tokenizer, data)[0]
    assert tokenizer.decode(row.prompt_token_ids) == "15="


def test_a_long_prompt_is_an_error_that_names_its_row(write_parquet, record, tokenizer):
    path = write_parquet([record("1"), record("12345")])
    dataset = PromptDataset([path], tokenizer, options(max_prompt_length=5))
    assert tokenizer.decode(dataset[0].prompt_token_ids) == "1="
    with pytest.raises(ValueError, match=r"max_prompt_length=5 tokens, got 6 in row 1 of .*data.parquet"):
        dataset[1]


def test_filter_leaves_long_prompts_out_and_keeps_row_numbers(write_parquet, record, tokenizer):
    path = write_parquet([record("12345"), record("1"), record("123456"), record("2")])
    data = options(max_prompt_length=5, filter_overlong_prompts=True)
    dataset = PromptDataset([path], tokenizer, data)
    assert [(dataset[i].row_index, *questions([dataset[i]])) for i in range(len(dataset))] == [
        (1, "1"),
        (3, "2"),
    ]
    with pytest.raises(ValueError, match="leaves none"):
        PromptDataset([path], tokenizer, options(max_prompt_length=1, filter_overlong_prompts=True))


def test_row_choice():
    assert list(select_rows(4, -1, None)) == [0, 1, 2, 3]
    assert list(select_rows(4, 9, 1)) == [0, 1, 2, 3]
    assert list(select_rows(4, 2, None)) == [0, 1]
    chosen = [tuple(select_rows(100, 5, seed)) for seed in range(20)]
    assert all(list(rows) == sorted(set(rows)) and len(rows) == 5 and rows[-1] < 100 for rows in chosen)
    assert len(set(chosen)) == 20
    assert chosen[3] == tuple(select_rows(100, 5, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "407="}, "must hold a list of chat messages.*row 0 of"),
        ({"reward_model": None}, "column 'reward_model' must hold a value in every row, but row 0"),
        ({"reward_model": {"style": "rule"}}, "ground_truth.*row 0"),
        ({"data_source": None}, "column 'data_source' must hold a value in every row, but row 0"),
    ],
)
def test_malformed_rows_are_refused_at_start(change, message, write_parquet, record, tokenizer):
    with pytest.raises(ValueError, match=message):
        PromptDataset([write_parquet([record("1", **change)])], tokenizer, options())


@pytest.mark.parametrize("nothing", [None, []])
def test_a_run_may_have_no_validation_prompts(nothing, ten_rows, tokenizer):
    data = config(ten_rows, val_files=nothing)
    assert build_validation_rows(data, tokenizer) == []
    assert questions([PromptStream(build_train_loader(data, tokenizer)).first()]) == ["10"]


def test_loader_serves_seeded_batches_that_differ_by_epoch(ten_rows, tokenizer):
    loader = build_train_loader(config(ten_rows, train_batch_size=3), tokenizer)
    assert len(loader) == 3
    first, second = [[questions(batch) for batch in loader] for _ in range(2)]
    assert [len(batch) for batch in first] == [3, 3, 3]
    assert len({question for batch in first for question in batch}) == 9
    assert first != second
    assert first == [
        questions(b) for b in build_train_loader(config(ten_rows, train_batch_size=3), tokenizer)
    ]
    assert first != [
        questions(b) for b in build_train_loader(config(ten_rows, train_batch_size=3, seed=2), tokenizer)
    ]


def test_without_shuffle_rows_come_in_the_order_of_the_file(ten_rows, tokenizer):
    loader = build_train_loader(config(ten_rows, shuffle=False, train_max_samples=4), tokenizer)
    assert [questions(batch) for batch in loader] == [["10", "11"], ["12", "13"]]


@pytest.mark.parametrize("workers", [(0, 0), (0, 2), (2, 0), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("drawn", [0, 2, 3, 4])
def test_a_run_resumes_with_the_same_rows_whatever_processes_read_them(workers, drawn, ten_rows, tokenizer):
    """3 batches an epoch: a state taken after 3 lies on the border of two epochs."""

    def stream(num_workers, saved=None):
        options = config(ten_rows, train_batch_size=3, dataloader_num_workers=num_workers, seed=4)
        return PromptStream(build_train_loader(options, tokenizer), saved)

    def take(prompts, count):
        return [(epoch, questions(rows)) for epoch, rows in (prompts.draw() for _ in range(count))]

    expected = take(stream(0), 8)
    before, after = workers
    first = stream(before)
    assert take(first, drawn) + take(stream(after, first.state_dict()), 8 - drawn) == expected


def test_other_prompts_are_refused_and_the_same_ones_may_move(write_parquet, record, tokenizer, tmp_path):
    rows = {name: [record(f"{name}{number}") for number in range(4)] for name in "12"}
    one, two = (write_parquet(rows[name], f"{name}.parquet") for name in "12")
    moved = tmp_path / "moved.jsonl"
    moved.write_text("\n".join(json.dumps(dict(reversed(row.items()))) for row in rows["1"] + rows["2"]))

    def stream(files, saved=None):
        return PromptStream(build_train_loader(config(files), tokenizer), saved)

    first = stream([one, two])
    first.draw()
    rest = [questions(first.draw()[1]) for _ in range(5)]
    first = stream([one, two])
    first.draw()
    again = stream([str(moved)], first.state_dict())
    assert [questions(again.draw()[1]) for _ in range(5)] == rest
    for other in ([two, one], [one, one]):
        with pytest.raises(
            ValueError, match=r"must read the data it was started with.* Restore data.train_files"
        ):
            stream(other, first.state_dict())


def test_fewer_prompts_than_a_batch_are_refused(ten_rows, tokenizer):
    with pytest.raises(ValueError, match=r"data.train_batch_size=8 prompts, got 5"):
        build_train_loader(config(ten_rows, train_batch_size=8, train_max_samples=5), tokenizer)


def test_validation_rows_are_all_rows_in_order(ten_rows, tokenizer):
    assert questions(build_validation_rows(config(ten_rows), tokenizer)) == [str(10 + i) for i in range(10)]
    some = build_validation_rows(config(ten_rows, val_max_samples=4), tokenizer)
    assert len(some) == 4
    assert some == build_validation_rows(config(ten_rows, val_max_samples=4), tokenizer)
    assert some != build_validation_rows(config(ten_rows, val_max_samples=4, seed=2), tokenizer)


def test_json_lines_serve_the_same_prompts_as_parquet(ten_rows, record, tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record(str(10 + i))) + "\n" for i in range(10)))
    for build in (build_train_loader, build_validation_rows):
        assert list(build(config(str(path)), tokenizer)) == list(build(config(ten_rows), tokenizer))


def test_weighted_files_share_every_batch_and_resume(write_parquet, record, tokenizer):
    files = [write_parquet([record(str(base + i)) for i in range(8)], f"{base}.parquet") for base in (10, 90)]
    options = config(files, train_batch_size=4, train_weights=[1, 3])
    stream = PromptStream(build_train_loader(options, tokenizer))
    batches = [questions(stream.draw()[1]) for _ in range(5)]
    assert [sum(question >= "90" for question in batch) for batch in batches] == [3] * 5
    resumed = PromptStream(build_train_loader(options, tokenizer), stream.state_dict())
    assert [questions(resumed.draw()[1]) for _ in range(6)] == [questions(stream.draw()[1]) for _ in range(6)]


def test_sizes_of_files_count_what_is_left(write_parquet, record, tokenizer):
    files = [
        write_parquet([record(q) for q in rows], f"{rows[0]}.parquet")
        for rows in (["1", "123456"], ["2"], ["34", "5"])
    ]
    data = options(max_prompt_length=5, filter_overlong_prompts=True)
    assert PromptDataset(files, tokenizer, data).file_sizes() == [1, 1, 2]
    assert PromptDataset(files, tokenizer, options(shuffle=False), 2).file_sizes() == [2, 0, 0]


def test_arguments_of_the_chat_template_change_the_prompts(ten_rows, tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0]['content'] }}{{ '' if enable_thinking else '!' }}"
    )
    own = load_tokenizer(str(folder))
    for given, expected in (({}, "10!"), ({"enable_thinking": True}, "10")):
        rows = build_validation_rows(config(ten_rows, apply_chat_template_kwargs=given), own)
        assert own.decode(rows[0].prompt_token_ids) == expected


def test_the_line_about_lengths_refuses_prompts_that_the_run_would_stumble_over(
    write_parquet, record, tokenizer
):
    path = write_parquet([record("1"), record("123456")])
    with pytest.raises(ValueError, match=r"max_prompt_length=5 tokens, got 7 in row 1 of"):
        PromptDataset([path], tokenizer, options(max_prompt_length=5)).describe_lengths()
    line = PromptDataset(
        [path], tokenizer, options(max_prompt_length=5, truncation="left")
    ).describe_lengths()
    assert (
        line
        == "2 prompts by tokens: 2-3: 50%, 4-7: 50%; median 2, longest 7, data.max_prompt_length=5, longer "
        "50.0%"
    )


def test_data_sources_are_found_in_all_chosen_rows_of_all_files(write_parquet, record, tokenizer):
    first = write_parquet([record("1", data_source="a"), record("2", data_source="b")], "first.parquet")
    second = write_parquet([record("3", data_source="a"), record("12345", data_source="c")], "second.parquet")
    dataset = PromptDataset([first, second], tokenizer, options())
    assert dataset.data_sources() == {
        "a": f"row 0 of {first}",
        "b": f"row 1 of {first}",
        "c": f"row 1 of {second}",
    }
    fewer = PromptDataset(
        [first, second], tokenizer, options(max_prompt_length=5, filter_overlong_prompts=True)
    )
    assert fewer.data_sources().keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": [{"role": "user", "content": None}]}, "must hold a list of chat messages"),
        ({"data_source": None}, "column 'data_source' must hold a value in every row, but row 9 of"),
        ({"reward_model": None}, "column 'reward_model' must hold a value in every row, but row 9 of"),
    ],
)
def test_a_malformed_row_is_named_before_the_first_step(changes, message, write_parquet, record, tokenizer):
    path = write_parquet([*(record(str(row)) for row in range(9)), record("9", **changes)])
    with pytest.raises(ValueError, match=message):
        build_train_loader(config(path), tokenizer)


def test_extra_info_is_a_mapping_or_nothing(write_parquet, record, tokenizer):
    path = write_parquet([record("1", extra_info="text")])
    with pytest.raises(
        ValueError, match=r"column 'extra_info' must hold a mapping .* got 'text' in row 0 of"
    ):
        PromptDataset([path], tokenizer, options())


def test_a_template_that_cannot_render_a_row_names_it(write_parquet, record, tokenizer):
    class Refusing:
        def apply_chat_template(self, *_, **__):
            raise RuntimeError("roles must alternate")

    path = write_parquet([record("1")])
    with pytest.raises(
        ValueError,
        match=r"row 0 of .*: the chat template must render .* but raised RuntimeError: roles must altern",
    ):
        PromptDataset([path], Refusing(), options())


def test_bins_double_and_the_limit_is_counted():
    assert describe_lengths([1, 3, 9, 8, 15, 4, 20, 21, 2, 9], 10, limit=20) == (
        "10 prompts by tokens: 1: 10%, 2-3: 20%, 4-7: 10%, 8-15: 40%, 16-31: 20%; median 8, longest 21, "
        "data.max_prompt_length=20, longer 10.0%"
    )


def test_a_sample_says_that_it_is_one():
    assert describe_lengths([8], 500, limit=9).startswith("1 of 500 prompts by tokens: 8-15: 100%")


def test_spread_numbers():
    assert evenly_spread(3, 10) == [0, 1, 2]
    assert evenly_spread(10, 4) == [0, 3, 6, 9]
    assert evenly_spread(11, 5) == [0, 3, 6, 9]


ROWS, SIZE = 7, 2
BATCHES_PER_EPOCH = 3


def make_stream(rows: int = ROWS) -> PromptStream:
    order = EpochBatches(rows, SIZE, seed=3, shuffle=True)
    return PromptStream(DataLoader(list(range(rows)), batch_sampler=order, collate_fn=list))  # type: ignore[arg-type]


def test_an_epoch_serves_every_row_once_and_the_next_one_follows() -> None:
    stream = make_stream()
    assert len(stream) == BATCHES_PER_EPOCH
    drawn = [stream.draw() for _ in range(3 * BATCHES_PER_EPOCH)]
    assert [epoch for epoch, _ in drawn] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    orders = []
    for epoch in range(3):
        rows = [row for number, batch in drawn if number == epoch for row in batch]
        assert len(set(rows)) == BATCHES_PER_EPOCH * SIZE
        orders.append(rows)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("drawn_before", range(8))
def test_a_resumed_stream_goes_on_with_the_next_batch(drawn_before: int) -> None:
    whole = make_stream()
    expected = [whole.draw() for _ in range(10)]
    first = make_stream()
    for _ in range(drawn_before):
        first.draw()
    second = make_stream()
    second.load_state_dict(first.state_dict())
    assert [second.draw() for _ in range(10 - drawn_before)] == expected[drawn_before:]


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="a resumed run must read the data it was started with"):
        make_stream().load_state_dict({"position": 3})


def test_a_position_in_other_data_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ValueError, match="a resumed run must read the data it was started with"):
        make_stream(rows=8).load_state_dict(make_stream().state_dict())


def test_the_first_chosen_row_without_a_ground_truth_is_found(write_parquet, record, tokenizer):
    rows = [record(str(10 + i)) for i in range(4)]
    rows[2]["reward_model"]["ground_truth"] = None
    path = write_parquet(rows)
    dataset = PromptDataset([path], tokenizer, options(shuffle=False))
    assert dataset.without_ground_truth() == f"row 2 of {path}"
    assert PromptDataset([path], tokenizer, options(shuffle=False), 2).without_ground_truth() is None
