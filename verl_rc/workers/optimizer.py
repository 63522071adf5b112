"""AdamW and the learning-rate schedule, built from the ``optim`` section of a worker's configuration."""

import math
from collections.abc import Iterable

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from verl_rc.config.models import OptimConfig


def build_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> AdamW:
    """AdamW over fp32 master weights; the fused kernel where torch has one for the device."""
    trainable = [p for p in parameters if p.requires_grad]
    return AdamW(trainable, lr=config.lr, betas=(config.betas[0], config.betas[1]), weight_decay=config.weight_decay, fused=True)


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Warm-up length in training steps: ``lr_warmup_steps`` when >= 0, else the ratio of all steps."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * total_steps)


def build_scheduler(optimizer: AdamW, config: OptimConfig, total_steps: int) -> LambdaLR:
    """Linear warm-up, then constant, linear decay or cosine decay to ``min_lr_ratio`` of the peak at
    ``total_steps``."""
    warmup = warmup_steps(config, total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.lr_scheduler_type == "constant":
            return 1.0
        progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        if config.lr_scheduler_type == "linear":
            remaining = 1.0 - progress
        else:
            remaining = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
        return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining

    return LambdaLR(optimizer, factor)
