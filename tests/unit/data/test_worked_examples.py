"""Worked examples: what is context, what is learnt, and which conversations are refused."""

import shutil

import pytest

from verl_rc.data.tokenize import load_tokenizer
from verl_rc.data.worked_examples import read_worked_examples


def conversation(*texts):
    roles = ["user", "assistant", "user", "assistant"]
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def test_only_the_last_answer_and_its_end_token_are_learnt(write_parquet, tokenizer):
    one, two = conversation("12", "3"), conversation("1", "2", "3", "45")
    files = [write_parquet([one], "a.parquet"), write_parquet([two], "b.parquet")]
    examples = read_worked_examples(files, "messages", tokenizer, max_length=32)
    decoded = [(tokenizer.decode(e.prompt_token_ids), tokenizer.decode(e.answer_token_ids), e.num_tokens) for e in examples]
    assert decoded == [("12=", "3<|im_end|>", 5), ("1=2<|im_end|>3=", "45<|im_end|>", 9)]


def test_the_column_can_have_another_name(write_parquet, tokenizer):
    path = write_parquet([{"chat": conversation("1", "2")["messages"]}])
    assert len(read_worked_examples([path], "chat", tokenizer, 8)) == 1
    with pytest.raises(ValueError, match=r"lacks .'messages'"):
        read_worked_examples([path], "messages", tokenizer, 8)


@pytest.mark.parametrize(
    ("row", "limit", "message"),
    [
        (conversation("1", "2", "3"), 32, r"end with an assistant message, got the roles .*'user'\] in row 1 of"),
        (conversation("1"), 32, "must have a question and end with an assistant"),
        (conversation("12345", "12345"), 11, r"at most data.max_length=11 tokens, got 12 in row 1 of"),
    ],
)
def test_refused_rows_are_named(row, limit, message, write_parquet, tokenizer):
    with pytest.raises(ValueError, match=message):
        read_worked_examples([write_parquet([conversation("1", "2"), row])], "messages", tokenizer, limit)


def test_a_template_that_does_not_continue_its_prompt_is_refused(write_parquet, tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(
        "{{ messages|length }}{{ messages[0]['content'] }}{% if add_generation_prompt %}={% endif %}"
    )
    path, broken = write_parquet([conversation("1", "2")]), load_tokenizer(str(folder))
    with pytest.raises(ValueError, match=r"followed by the answer, but in row 0 .*the prompt is '11=' and the whole '21'"):
        read_worked_examples([path], "messages", broken, 32)
