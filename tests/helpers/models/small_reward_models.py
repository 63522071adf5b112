"""A very small reward model on disk; shared by tests of its worker and of its process."""

from pathlib import Path

import torch
from make_tiny_model import build_tokenizer
from small_models import small_model_config
from transformers import Qwen2ForSequenceClassification


def write_reward_model(folder: Path, num_labels: int = 1, has_padding: bool = True) -> Path:
    """A classifier with random weights; one token per byte."""
    tokenizer = build_tokenizer(64)
    if not has_padding:
        tokenizer.pad_token = None
    config = small_model_config(len(tokenizer), num_labels=num_labels, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    """One question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
