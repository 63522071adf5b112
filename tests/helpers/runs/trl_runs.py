"""Runs of TRL's GRPO on a CPU with the hook, healthy and with planted faults."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

from verl_rc.insight.hooks.trl import record_tokens

Fault = Callable[[GRPOTrainer], None]


def _cooler(trainer: GRPOTrainer) -> None:
    """The engine samples at temperature 0.9; the trainer scores at 1."""
    trainer.generation_config.temperature = 0.9


def _after_sampling(change: Callable[[dict[str, Any]], None], trainer: GRPOTrainer) -> None:
    stock = trainer._generate_and_score_completions

    def changed(inputs: Any) -> Any:
        output = stock(inputs)
        change(output)
        return output

    trainer._generate_and_score_completions = changed


def _shift_mask(output: dict[str, Any]) -> None:
    """The mask marks the token behind each sampled one."""
    mask = output["completion_mask"]
    output["completion_mask"] = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1)


def _drop_first_prompt_token(output: dict[str, Any]) -> None:
    """The trainer does not see the first token of the prompt."""
    mask = output["prompt_mask"]
    mask[torch.arange(len(mask)), mask.argmax(dim=1)] = 0


def _narrow_head(trainer: GRPOTrainer) -> None:
    """The engine's head computes in bfloat16. TRL's loss takes the head's weight, and not this function."""
    head = trainer.model.lm_head

    def forward(hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.bfloat16(), head.weight.bfloat16()).float()

    head.forward = forward


FAULTS: dict[str, tuple[dict[str, Any], Fault]] = {
    "healthy": ({}, lambda trainer: None),
    "temperature": ({}, _cooler),
    "top_k": ({"top_k": 5}, lambda trainer: None),
    "top_p": ({"top_p": 0.9}, lambda trainer: None),
    "mask": ({}, functools.partial(_after_sampling, _shift_mask)),
    "prompt": ({}, functools.partial(_after_sampling, _drop_first_prompt_token)),
    "head": ({}, _narrow_head),
}
"""Settings of TRL, and what is planted in its trainer."""


def digits(rows: int) -> Dataset:
    """Prompts of digits, to be sorted."""
    numbers = random.Random(0)
    return Dataset.from_list(
        [
            {"prompt": "".join(numbers.choices("0123456789", k=numbers.randint(4, 12))) + "="}
            for _ in range(rows)
        ]
    )


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Share of digits that stand at their place in the sorted number."""
    answers = ("".join(sorted(prompt.rstrip("="))) for prompt in prompts)
    pairs = zip(answers, completions, strict=True)
    return [sum(a == b for a, b in zip(answer, text, strict=False)) / len(answer) for answer, text in pairs]


def train(
    model: str, output: Path, kind: str, steps: int, recorded: bool = True, **settings: Any
) -> GRPOTrainer:
    """Train, with token records below ``output`` where ``recorded``."""
    options, plant = FAULTS[kind]
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    arguments = GRPOConfig(
        **{
            "output_dir": str(output),
            "per_device_train_batch_size": 64,
            "num_generations": 8,
            "max_completion_length": 16,
            "max_steps": steps,
            "learning_rate": 1e-5,
            "save_strategy": "steps",
            "save_steps": steps,
            "save_only_model": True,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "seed": 0,
            **options,
            **settings,
        }
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward,
        arguments,
        digits(512),
        processing_class=tokenizer,
    )
    plant(trainer)
    if recorded:
        record_tokens(trainer)
    trainer.train()
    return trainer
