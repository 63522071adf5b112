"""A very small reward model on disk; shared by tests of its worker and of its process."""

from pathlib import Path

import torch
from make_tiny_model import build_tokenizer
from transformers import Qwen2Config, Qwen2ForSequenceClassification


def write_reward_model(folder: Path, num_labels: int = 1) -> Path:
    """A classifier with random weights that are not tiny; one token per byte, 64 positions."""
    tokenizer = build_tokenizer(64)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=num_labels,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    """One question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
