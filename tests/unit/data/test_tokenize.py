"""Tokenizers are loaded as their files describe them, prompts end where the answer begins."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from verl_rc.data.tokenize import ToolTurnEncoder, encode_messages, encode_prompt, load_tokenizer

CONVERSATION = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]


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
    assert text(load_tokenizer(str(folder)), encode_prompt(load_tokenizer(str(folder)), CONVERSATION, {"mood": "!"})) == "12!"


def test_custom_pre_tokenizer_survives(tokenizer_folder, tmp_path):
    """A vocabulary that splits at every character, in a folder that calls itself qwen2."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    document = json.loads((folder / "tokenizer.json").read_text())
    document["pre_tokenizer"] = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
    document["decoder"] = {"type": "Fuse"}
    document["model"]["vocab"] = {symbol: index for index, symbol in enumerate("ab\n*(")}
    document["added_tokens"] = [{**token, "id": 5 + i} for i, token in enumerate(document["added_tokens"])]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer("b\n*(a")["input_ids"] == [1, 2, 3, 4, 0]
    assert AutoTokenizer.from_pretrained(folder)("b\n*(a")["input_ids"] != [1, 2, 3, 4, 0], "the trap is gone: simplify"


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


def test_what_follows_an_assistants_turn(tokenizer):
    encoder = ToolTurnEncoder(tokenizer)
    assert text(tokenizer, encoder.encode(["42"])) == "42="
    assert text(tokenizer, encoder.encode(["4", "2"])) == "42="


def test_everything_behind_the_end_token_belongs_to_the_answer(tokenizer_folder, tmp_path):
    """Templates of Qwen's kind put a newline behind the end token of a turn, which the policy never samples."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    own = load_tokenizer(str(folder))
    assert text(own, ToolTurnEncoder(own).encode(["7"])) == "\n<tool>7<|im_end|>\n<assistant>"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "7"}]
    assembled = encode_prompt(own, turns[:1]) + own("a<|im_end|>")["input_ids"] + ToolTurnEncoder(own).encode(["7"])
    assert assembled == encode_prompt(own, turns)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1]['content'] }}", "must end an assistant's turn with the end token"),
        ("{{ messages|length }}<|im_end|>{{ messages[-1]['content'] }}", "behind the turns before it"),
        ("{% for m in messages[:2] %}{{ m['content'] }}<|im_end|>{% endfor %}", "behind the turns before it"),
    ],
)
def test_templates_that_tools_cannot_use_are_refused(template, message, tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(template)
    own = load_tokenizer(str(folder))
    with pytest.raises(ValueError, match=message):
        ToolTurnEncoder(own).encode(["7"])
