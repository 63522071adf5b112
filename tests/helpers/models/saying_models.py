"""A model that says one of some texts in every turn, all equally likely; each is one token for it."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from make_tiny_model import build_model, build_tokenizer
from tokenizers import AddedToken

SHAPE = Namespace(
    seed=1,
    hidden_size=128,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    max_length=1024,
    tie_word_embeddings=False,
    experts=0,
    vision=None,
)


def write_saying_model(folder: Path, texts: Sequence[str]) -> Any:
    """Write the model with its tokenizer, which is returned."""
    tokenizer = build_tokenizer(SHAPE.max_length)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    said = tokenizer.convert_tokens_to_ids(list(texts))
    (begin,) = tokenizer("=")["input_ids"]
    model = build_model(SHAPE, tokenizer)
    embeddings, output = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        for layer in model.model.layers:  # a token depends on the one before it, and hardly on others
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        embeddings.mul_(0.1)
        output.mul_(0.1)
        for tokens, followers, place in (([begin], said, 0), (said, [tokenizer.eos_token_id], 1)):
            embeddings[tokens] = 8.0 * torch.eye(SHAPE.hidden_size)[place]
            output[followers, place] = 3.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer
