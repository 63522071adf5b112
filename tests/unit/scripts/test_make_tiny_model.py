"""The tiny model: a folder that every loader reads alike."""

import json
import unicodedata
from pathlib import Path

import make_tiny_model
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from verl_rc.records.tokenize import load_tokenizer

SMALL = [
    "--num_layers",
    "1",
    "--hidden_size",
    "16",
    "--num_heads",
    "2",
    "--num_kv_heads",
    "1",
    "--intermediate_size",
    "32",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model.main(["--output_dir", str(path), "--seed", "3", *SMALL])
    return path


@pytest.fixture(scope="module")
def tokenizers(folder):
    return load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
@example(text="\uf900")  # NFC writes another character for it
def test_both_loaders_of_the_tokenizer_agree_and_lose_nothing(tokenizers, text):
    ours, automatic = tokenizers
    token_ids = ours(text)["input_ids"]
    assert token_ids == automatic(text)["input_ids"]
    text = unicodedata.normalize("NFC", text)
    assert ours.decode(token_ids) == text
    if "<|" not in text:
        assert len(token_ids) == len(text.encode())


def test_the_vocabulary_fits_the_embedding(folder, tokenizers):
    config = json.loads((folder / "config.json").read_text())
    assert {config["vocab_size"]} == {len(tokenizer) for tokenizer in tokenizers} == {258}


def test_special_tokens(folder, tokenizers):
    for tokenizer in tokenizers:
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizers[0].eos_token_id
    assert tokenizers[0].decode([tokenizers[0].eos_token_id], skip_special_tokens=True) == ""


def test_chat_template(tokenizers):
    conversation = [{"role": "user", "content": "4071835926"}, {"role": "assistant", "content": "0123456789"}]
    for tokenizer in tokenizers:
        assert (
            tokenizer.apply_chat_template(conversation, tokenize=False) == "4071835926=0123456789<|im_end|>"
        )
        prompt = tokenizer.apply_chat_template(conversation[:1], tokenize=False, add_generation_prompt=True)
        assert prompt == "4071835926="


def test_equal_seeds_give_equal_weights(folder, tmp_path):
    make_tiny_model.main(["--output_dir", str(tmp_path / "same"), "--seed", "3", *SMALL])
    make_tiny_model.main(["--output_dir", str(tmp_path / "other"), "--seed", "4", *SMALL])
    one, same, other = [
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (folder, tmp_path / "same", tmp_path / "other")
    ]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_tied_embeddings(tmp_path):
    make_tiny_model.main(["--output_dir", str(tmp_path), "--tie_word_embeddings", *SMALL])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_heads_that_do_not_divide_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as raised:
        make_tiny_model.main(["--output_dir", str(tmp_path), "--hidden_size", "10", "--num_heads", "4"])
    assert raised.value.code == 2
    assert "--num_heads must divide --hidden_size" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as refused:
        make_tiny_model.main(["--output_dir", str(tmp_path / "file" / "model")])
    assert refused.value.code == 2
    assert "--output_dir: must be a folder that can be written to" in capsys.readouterr().err


def test_experts(tmp_path):
    make_tiny_model.main(["--output_dir", str(tmp_path), *SMALL, "--experts", "4"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3_moe"
    assert model.model.layers[0].mlp.experts.down_proj.shape == (4, 16, 32)
    with pytest.raises(SystemExit):
        make_tiny_model.main(["--output_dir", str(tmp_path), *SMALL, "--experts", "2"])
