"""Checkpoints of a very small model after changes to its weights, and what the changed models compute."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_tiny_model
import torch
from torch import Tensor
from two_processes import free_port

from verl_rc.config.run import RunConfig
from verl_rc.runtime.checkpoint import RunState, SavedRun
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.workers.critic_worker import CriticWorker
from verl_rc.runtime.workers.forward import packed_logits
from verl_rc.runtime.workers.policy_worker import PolicyWorker

TOKENS = torch.tensor([[7, 3, 250, 41, 3, 3, 99, 120, 5, 64, 200, 31]])
STEP = 3


@dataclass(frozen=True)
class SmallCheckpoint:
    """A checkpoint on disk, and the models in it as they were in memory."""

    folder: Path
    weights: dict[str, dict[str, Tensor]]
    """By role and name, whole."""
    outputs: dict[str, Tensor]
    """By role: logits or values of ``TOKENS``."""


def write_tiny_model(folder: Path, *options: str) -> Path:
    """A model with a tokenizer, whose head_dim of 32 a vLLM on a CPU can have."""
    sizes = [
        "--hidden_size",
        "64",
        "--intermediate_size",
        "96",
        "--num_layers",
        "2",
        "--num_heads",
        "2",
        "--num_kv_heads",
        "1",
    ]
    make_tiny_model.main(["--output_dir", str(folder), *sizes, *options])
    return folder


def write_checkpoint(config: RunConfig, folder: Path) -> SmallCheckpoint:
    """Change every trained weight of the actor (and of the critic, if there is one) and save what a run would
    save."""
    torch.manual_seed(0)  # adapters begin at random, whatever ran before in this process
    weights: dict[str, dict[str, Tensor]] = {}
    outputs: dict[str, Tensor] = {}
    kinds: dict[str, Callable[..., Any]] = {"actor": PolicyWorker} | (
        {"critic": CriticWorker} if config.needs_critic else {}
    )
    for role, kind in kinds.items():
        worker = kind(config, RankAddress(0, 1, "127.0.0.1", free_port()), total_steps=10)
        try:
            module = worker.model.module.eval()
            change(module)
            weights[role] = {name: whole(parameter) for name, parameter in module.named_parameters()}
            with torch.no_grad():
                outputs[role] = packed_logits(module, TOKENS[0], [TOKENS.numel()])
            worker.save(folder / role)
        finally:
            worker.close()
    SavedRun(RunState(step=STEP), config.model_dump(mode="json"), num_ranks=1).save(folder)
    return SmallCheckpoint(folder, weights, outputs)


def change(module: torch.nn.Module) -> None:
    """Move every trained weight so far that the model before cannot be mistaken for it."""
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        if parameter.requires_grad:
            here: Any = parameter.detach()
            here.to_local().add_(0.1 * torch.randn(here.to_local().shape, generator=generator))


def whole(parameter: Any) -> Tensor:
    """The full tensor of a sharded parameter."""
    full: Tensor = parameter.detach().full_tensor().clone()
    return full
