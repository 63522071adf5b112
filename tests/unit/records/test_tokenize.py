"""Token ids: prompts and tool turns as the chat template has them; of worked examples, what is context and
what is learnt."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from verl_rc.records.tokenize import (
    ContinuationEncoder,
    encode_messages,
    encode_prompt,
    load_tokenizer,
    read_worked_examples,
    require_same_vocabulary,
)

CONVERSATION = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]


def tool(text):
    return {"role": "tool", "content": text}


def text(tokenizer, token_ids):
    return tokenizer.decode(token_ids)


def test_prompt_ends_where_the_answer_begins(tokenizer):
    assert text(tokenizer, encode_prompt(tokenizer, CONVERSATION[:1])) == "12="


def test_conversation_continues_its_prompt_and_ends_with_the_end_token(tokenizer):
    prompt, whole = encode_prompt(tokenizer, CONVERSATION[:1]), encode_messages(tokenizer, CONVERSATION)
    assert whole[: len(prompt)] == prompt
    assert text(tokenizer, whole[len(prompt) :]) == "3<|im_end|>"
    assert whole[-1] == tokenizer.eos_token_id


def test_template_arguments_reach_the_template(tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ mood }}")
    assert (
        text(
            load_tokenizer(str(folder)),
            encode_prompt(load_tokenizer(str(folder)), CONVERSATION, {"mood": "!"}),
        )
        == "12!"
    )


def test_custom_pre_tokenizer_survives(tokenizer_folder, tmp_path):
    """A vocabulary that splits at every character, in a folder that calls itself qwen2."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    document = json.loads((folder / "tokenizer.json").read_text())
    document["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": ""},
        "behavior": "Isolated",
        "invert": False,
    }
    document["decoder"] = {"type": "Fuse"}
    document["model"]["vocab"] = {symbol: index for index, symbol in enumerate("ab\n*(")}
    document["added_tokens"] = [{**token, "id": 5 + i} for i, token in enumerate(document["added_tokens"])]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer("b\n*(a")["input_ids"] == [1, 2, 3, 4, 0]
    assert AutoTokenizer.from_pretrained(folder)("b\n*(a")["input_ids"] != [1, 2, 3, 4, 0], (
        "the trap is gone: simplify"
    )


def test_padding_falls_back_to_the_end_token(tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.*no such folder"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"must hold the model.s tokenizer .tokenizer.json."):
        load_tokenizer(str(tmp_path))


def test_missing_chat_template_is_named(tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="lacks chat_template"):
        load_tokenizer(str(folder))


def teacher(tokenizer_folder, folder, vocab_size=300, without=()):
    """A folder of a teacher without a chat template, and without some tokens."""
    shutil.copytree(tokenizer_folder, folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": vocab_size}))
    document = json.loads((folder / "tokenizer.json").read_text())
    kept = [token for token in document["model"]["vocab"] if token not in without]
    document["model"]["vocab"] = {token: index for index, token in enumerate(kept)}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return str(folder)


def test_a_teacher_has_the_policys_tokens_and_perhaps_more_rows(tokenizer, tokenizer_folder, tmp_path):
    require_same_vocabulary(tokenizer, teacher(tokenizer_folder, tmp_path / "teacher"))


def test_a_teacher_with_other_tokens_is_refused(tokenizer, tokenizer_folder, tmp_path):
    other = teacher(tokenizer_folder, tmp_path / "teacher", without=("3",))
    with pytest.raises(ValueError, match=r"must have its tokenizer, but that of .* take a teacher of the"):
        require_same_vocabulary(tokenizer, other)


def test_a_teacher_with_too_few_rows_is_refused(tokenizer, tokenizer_folder, tmp_path):
    other = teacher(tokenizer_folder, tmp_path / "teacher", vocab_size=3)
    with pytest.raises(ValueError, match=r"a weight for each token .* has 3 .vocab_size"):
        require_same_vocabulary(tokenizer, other)


def test_what_follows_an_assistants_turn(tokenizer):
    encoder = ContinuationEncoder(tokenizer)
    assert text(tokenizer, encoder.encode([tool("42")])) == "42="
    assert text(tokenizer, encoder.encode([tool("4"), tool("2")])) == "42="


def test_everything_behind_the_end_token_belongs_to_the_answer(tokenizer_folder, tmp_path):
    """Templates of Qwen's kind put a newline behind the EOS token of a turn, which the policy never
    samples."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    own = load_tokenizer(str(folder))
    assert text(own, ContinuationEncoder(own).encode([tool("7")])) == "\n<tool>7<|im_end|>\n<assistant>"
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "7"},
    ]
    assembled = (
        encode_prompt(own, turns[:1])
        + own("a<|im_end|>")["input_ids"]
        + ContinuationEncoder(own).encode([tool("7")])
    )
    assert assembled == encode_prompt(own, turns)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1]['content'] }}", "must end an assistant's turn with the EOS token"),
        ("{{ messages|length }}<|im_end|>{{ messages[-1]['content'] }}", "after the turns before it"),
        ("{% for m in messages[:2] %}{{ m['content'] }}<|im_end|>{% endfor %}", "after the turns before it"),
    ],
)
def test_templates_that_tools_cannot_use_are_refused(template, message, tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(template)
    own = load_tokenizer(str(folder))
    with pytest.raises(ValueError, match=message):
        ContinuationEncoder(own).encode([tool("7")])


def conversation(*texts):
    roles = ["user", "assistant", "user", "assistant"]
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def test_only_the_last_answer_and_its_end_token_are_learnt(write_parquet, tokenizer):
    one, two = conversation("12", "3"), conversation("1", "2", "3", "45")
    files = [write_parquet([one], "a.parquet"), write_parquet([two], "b.parquet")]
    examples = read_worked_examples(files, "messages", tokenizer, max_length=32)
    decoded = [
        (tokenizer.decode(e.prompt_token_ids), tokenizer.decode(e.answer_token_ids), e.num_tokens)
        for e in examples
    ]
    assert decoded == [("12=", "3<|im_end|>", 5), ("1=2<|im_end|>3=", "45<|im_end|>", 9)]


def test_the_column_can_have_another_name(write_parquet, tokenizer):
    path = write_parquet([{"chat": conversation("1", "2")["messages"]}])
    assert len(read_worked_examples([path], "chat", tokenizer, 8)) == 1
    with pytest.raises(ValueError, match=r"lacks .'messages'"):
        read_worked_examples([path], "messages", tokenizer, 8)


@pytest.mark.parametrize(
    ("row", "limit", "message"),
    [
        (
            conversation("1", "2", "3"),
            32,
            r"end with an assistant message, got the roles .*'user'\] in row 1 of",
        ),
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
    with pytest.raises(
        ValueError, match=r"followed by the answer, but in row 0 .*'11=' and the conversation '21'"
    ):
        read_worked_examples([path], "messages", broken, 32)
