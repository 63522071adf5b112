"""A very small reward model on disk; shared by tests of its worker and of its process."""

from pathlib import Path

import torch
from make_tiny_model import build_tokenizer
from small_models import small_model_config
from transformers import Qwen2ForSequenceClassification


def write_reward_model(
    folder: Path, num_labels: int = 1, has_padding: bool = True, pads_with_eos: bool = False
) -> Path:
    """A classifier with random weights; one token per byte."""
    tokenizer = build_tokenizer(64)
    if not has_padding:
        tokenizer.pad_token = None
    if pads_with_eos:
        tokenizer.pad_token = tokenizer.eos_token
    config = small_model_config(len(tokenizer), num_labels=num_labels, pad_token_id=tokenizer.pad_token_id)
    config.num_attention_heads = config.num_key_value_heads = 1  # of 32: vLLM on a CPU has no smaller ones
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    """One question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
