"""Supervised warm start in one process: packed batches, masked prompts, validation, early stop."""

import logging
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from verl_rc.config.sft import SftConfig
from verl_rc.data.batches import TokenBatch, left_padded, positions_mask
from verl_rc.data.tokenize import load_tokenizer
from verl_rc.data.worked_examples import WorkedExample, read_worked_examples
from verl_rc.workers.forward import ForwardOptions, score_tokens
from verl_rc.workers.language_model import load_causal_lm, padded_logits

_log = logging.getLogger("verl_rc")


def train_sft(config: SftConfig) -> None:
    """Train on worked examples until the step limit or the wished accuracy, and save a Hugging Face folder."""
    torch.manual_seed(config.trainer.seed)
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    data = config.data
    train = read_worked_examples(data.train_files, data.messages_key, tokenizer, data.max_length)
    held_out = read_worked_examples(data.val_files, data.messages_key, tokenizer, data.max_length)[: data.max_val_samples]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_causal_lm(config.model.path, torch.float32, trust_remote_code=config.model.trust_remote_code).to(device)
    optim = config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), weight_decay=optim.weight_decay, fused=True
    )
    batches = _batches(train, data.train_batch_size, config.trainer.seed)
    steps = config.trainer.total_steps
    for step in track(range(1, steps + 1), description="SFT", disable=not os.isatty(2)):
        batch = _as_tokens(next(batches), tokenizer.pad_token_id).to(device)
        loss = answer_loss(model.train(), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        if step % config.trainer.val_freq and step != steps:
            continue
        accuracy = greedy_accuracy(model.eval(), held_out, tokenizer)
        with torch.no_grad():
            held_out_loss = float(answer_loss(model, _as_tokens(held_out, tokenizer.pad_token_id).to(device)))
        _log.info(
            "SFT step %d/%d: loss %.3f, held-out loss %.3f, held-out greedy accuracy %.3f",
            step, steps, float(loss), held_out_loss, accuracy,
        )  # fmt: skip
        if config.trainer.stop_at_accuracy is not None and accuracy >= config.trainer.stop_at_accuracy:
            break
    _save(model, tokenizer, Path(config.trainer.output_dir))


def answer_loss(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Mean negative log-likelihood of the answers' tokens, nats; prompts are context only."""
    scores = score_tokens(model, batch, ForwardOptions(temperature=1.0), with_entropy=False)
    return -scores.log_probs.sum() / batch.response_lengths.sum()


@torch.no_grad()
def greedy_accuracy(model: nn.Module, examples: Sequence[WorkedExample], tokenizer: Any) -> float:
    """Share of examples whose whole answer is what the model would decode greedily.

    Teacher forcing decides it in one forward: the greedy answer equals the true one exactly when every token of the
    true answer is the most likely one after the true tokens before it.
    """
    batch = _as_tokens(examples, tokenizer.pad_token_id).to(next(model.parameters()).device)
    rows = [example.prompt_token_ids + example.answer_token_ids for example in examples]
    width = max(map(len, rows))
    token_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=batch.prompts.device)
    predicted = padded_logits(model, token_ids, positions_mask(batch.sequence_lengths, width)).argmax(dim=-1)
    position = torch.arange(width - 1, device=token_ids.device)
    in_answer = (position >= batch.prompt_lengths[:, None] - 1) & (position < batch.sequence_lengths[:, None] - 1)
    right = (predicted[:, :-1] == token_ids[:, 1:]) | ~in_answer
    return float(right.all(dim=-1).double().mean())


def _batches(examples: list[WorkedExample], size: int, seed: int) -> Iterator[list[WorkedExample]]:
    """Endless batches, reshuffled in every epoch."""
    if len(examples) < size:
        raise ValueError(f"data.train_files must hold at least data.train_batch_size={size} examples, got {len(examples)}.")
    order = random.Random(seed)
    while True:
        shuffled = order.sample(examples, len(examples))
        for start in range(0, len(examples) - size + 1, size):
            yield shuffled[start : start + size]


def _as_tokens(examples: Sequence[WorkedExample], pad_token_id: int) -> TokenBatch:
    prompts, prompt_lengths = left_padded([example.prompt_token_ids for example in examples], pad_token_id)
    lengths = torch.tensor([len(example.answer_token_ids) for example in examples])
    answers = torch.stack(
        [
            F.pad(torch.tensor(example.answer_token_ids), (0, int(lengths.max()) - len(example.answer_token_ids)), value=pad_token_id)
            for example in examples
        ]
    )
    return TokenBatch(
        prompts=prompts,
        prompt_lengths=prompt_lengths,
        responses=answers,
        response_lengths=lengths,
        batch_size=[len(examples)],
    )


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _log.info("model written to %s", folder)
