"""Supervised warm start in one process: packed batches, prompts as context only, validation, early stop."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from verl_rc.config.folder_owner import FolderClaim
from verl_rc.config.sft import SftConfig
from verl_rc.records.dataset import EpochBatches
from verl_rc.records.image_reader import ImageReader
from verl_rc.records.microbatch import MicroBatchLimit, assign_rows
from verl_rc.records.tokenize import WorkedExample, load_tokenizer, read_worked_examples
from verl_rc.runtime.workers.forward import packed_logits
from verl_rc.runtime.workers.host import usable_cores
from verl_rc.runtime.workers.language_model import load_causal_lm


@dataclass(frozen=True)
class SftSetup:
    """Everything a warm start consists of once it is loaded."""

    config: SftConfig
    tokenizer: Any
    reader: ImageReader | None
    """The model's. None if it reads no pictures."""
    model: nn.Module
    train: list[WorkedExample]
    held_out: list[WorkedExample]
    order: EpochBatches
    """Indices of the training examples of each batch."""


@dataclass(frozen=True)
class Validation:
    """Accuracy and loss on held-out examples."""

    loss: float
    """Mean negative log-likelihood of an answer token, nats."""
    accuracy: float
    """Share of examples that greedy decoding answers exactly, EOS included."""


@dataclass(frozen=True)
class SftResult:
    """The result of a warm start."""

    steps: int
    validation: Validation
    folder: Path
    """The trained model."""


def load_sft(config: SftConfig) -> SftSetup:
    """Load tokenizer, examples and model. Raises ``ValueError`` for everything that is wrong with them."""
    transformers_logging.disable_progress_bar()
    folder = Path(config.trainer.output_dir).expanduser()
    if folder.resolve() == Path(config.model.path).expanduser().resolve():
        raise ValueError(
            f"trainer.output_dir must be another folder than model.path, got {str(folder)!r} for both."
        )
    folder.mkdir(parents=True, exist_ok=True)
    data = config.data
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    reader = ImageReader.of(config.model.path, data.mm_processor_kwargs)
    how = data.messages_key, tokenizer, data.max_length, data.image_key, reader
    train, held_out = (read_worked_examples(files, *how) for files in (data.train_files, data.val_files))
    if len(train) < data.train_batch_size:
        raise ValueError(
            f"data.train_files must hold at least data.train_batch_size={data.train_batch_size} examples, "
            f"got {len(train)}. Lower the batch size or add examples."
        )
    torch.set_num_threads(
        min(torch.get_num_threads(), usable_cores())
    )  # PyTorch knows no CPU limits of containers
    torch.manual_seed(config.trainer.seed)
    model = load_causal_lm(
        config.model.path,
        torch.float32,
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
        trust_remote_code=config.model.trust_remote_code,
        pixel_limits=data.mm_processor_kwargs,
    )
    order = EpochBatches(len(train), data.train_batch_size, config.trainer.seed, shuffle=True)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    return SftSetup(config, tokenizer, reader, model, train, held_out[: data.val_max_samples], order)


def train_sft(setup: SftSetup, console: Console) -> SftResult:
    """Train until the step limit or the wished accuracy, and save a Hugging Face folder.

    Raises ``FloatingPointError`` when the loss or its gradient stops being a number.
    """
    trainer, optim = setup.config.trainer, setup.config.optim
    betas = (optim.betas[0], optim.betas[1])
    optimizer = torch.optim.AdamW(
        setup.model.parameters(), lr=optim.lr, betas=betas, weight_decay=optim.weight_decay, fused=True
    )
    batches = chain.from_iterable(repeat(setup.order))
    steps = trainer.total_training_steps
    result = None
    with _progress(console) as progress:
        bar = progress.add_task("SFT", total=steps)
        for step in range(1, steps + 1):
            loss = train_step(setup, [setup.train[row] for row in next(batches)], optimizer)
            progress.update(bar, advance=1)
            if step % trainer.test_freq and step != steps:
                continue
            result = validate(setup)
            console.print(
                f"SFT step {step}: loss {loss:.3f}, held-out loss {result.loss:.3f}, held-out accuracy "
                f"{result.accuracy:.3f}",
                highlight=False,
            )
            if trainer.stop_at_accuracy is not None and result.accuracy >= trainer.stop_at_accuracy:
                break
    assert result is not None
    if trainer.stop_at_accuracy is not None and result.accuracy < trainer.stop_at_accuracy:
        console.print(
            f"SFT ended below trainer.stop_at_accuracy={trainer.stop_at_accuracy}: raise "
            f"trainer.total_training_steps={steps}."
        )
    folder = Path(trainer.output_dir).expanduser()
    model: Any = setup.model
    with FolderClaim(folder, "model"):
        model.save_pretrained(folder)
        setup.tokenizer.save_pretrained(folder)
        if setup.reader is not None:
            setup.reader.save(folder)
    return SftResult(step, result, folder)


def train_step(setup: SftSetup, examples: Sequence[WorkedExample], optimizer: torch.optim.Optimizer) -> float:
    """One optimizer step; returns the mean loss of an answer token, nats, over all forward passes."""
    setup.model.train()
    num_answer_tokens = sum(len(example.answer_token_ids) for example in examples)
    total = torch.zeros((), device=_device(setup.model))
    for part in _micro_batches(examples, setup.config.data.max_token_len_per_gpu):
        logits, targets, _ = answer_logits(setup.model, part)
        # A sum over all answer tokens: a mean of micro-batches would weigh short ones more.
        loss = F.cross_entropy(logits.float(), targets, reduction="sum") / num_answer_tokens
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(setup.model.parameters(), setup.config.optim.clip_grad)
    optimizer.step()
    optimizer.zero_grad()
    # Read once, after the optimizer step: it makes the host wait for the device.
    mean = float(total)
    if not math.isfinite(mean) or not math.isfinite(norm):
        raise FloatingPointError(
            f"the SFT loss and the norm of its gradient must be numbers, got {mean} and {float(norm)}. Lower "
            f"optim.lr={setup.config.optim.lr}."
        )
    return mean


@torch.no_grad()
def validate(setup: SftSetup) -> Validation:
    """Loss and greedy exact-match accuracy on the held-out examples.

    One forward pass decides what greedy decoding would write: it writes exactly the true answer if and only
    if every token of the true answer is the most likely one after the true tokens before it.
    """
    setup.model.eval()
    negative_log_likelihood, num_right = 0.0, 0
    for part in _micro_batches(setup.held_out, setup.config.data.max_token_len_per_gpu):
        logits, targets, rows = answer_logits(setup.model, part)
        negative_log_likelihood += float(F.cross_entropy(logits.float(), targets, reduction="sum"))
        wrong_tokens = torch.zeros(len(part), device=rows.device).index_add(
            0, rows, (logits.argmax(-1) != targets).float()
        )
        num_right += int((wrong_tokens == 0).sum())
    num_tokens = sum(len(example.answer_token_ids) for example in setup.held_out)
    return Validation(negative_log_likelihood / num_tokens, num_right / len(setup.held_out))


def answer_logits(model: nn.Module, examples: Sequence[WorkedExample]) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions of ``model`` for the K answer tokens of ``examples``, packed into one forward pass.

    Returns logits ``[K, V]``, the tokens themselves int64 ``[K]``, and the example each belongs to int64
    ``[K]``.
    """
    device = _device(model)
    token_ids = torch.tensor(
        [token for e in examples for token in e.prompt_token_ids + e.answer_token_ids], device=device
    )
    is_answer = torch.tensor(
        [
            flag
            for e in examples
            for flag in [False] * len(e.prompt_token_ids) + [True] * len(e.answer_token_ids)
        ],
        device=device,
    )
    positions = is_answer.nonzero()[:, 0]
    lengths = torch.tensor([example.num_tokens for example in examples], device=device)
    rows = torch.repeat_interleave(torch.arange(len(examples), device=device), lengths)
    # A causal model predicts a token at the position before it.
    pictures = [example.pictures for example in examples]
    logits = packed_logits(model, token_ids, lengths, keep=positions - 1, pictures=pictures)
    return logits, token_ids[positions], rows[positions]


def _micro_batches(examples: Sequence[WorkedExample], max_tokens: int) -> Iterator[list[WorkedExample]]:
    lengths = [example.num_tokens for example in examples]
    (parts,) = assign_rows(lengths, num_ranks=1, limit=MicroBatchLimit(max_tokens=max_tokens))
    for rows in parts:
        yield [examples[row] for row in rows]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _progress(console: Console) -> Progress:
    """A progress bar at a terminal; elsewhere only validation lines are printed."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
