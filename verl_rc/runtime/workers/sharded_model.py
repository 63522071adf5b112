"""A model on one rank in FSDP2 shards: AdamW and schedule for a trained one, checkpoints, offload to host
memory."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from verl_rc.config.models import ActorConfig, CriticConfig, FsdpConfig, OptimConfig
from verl_rc.records.optimizer_step import OptimizerStep
from verl_rc.runtime.checkpoint import (
    BackgroundWriter,
    collect_shards,
    load_shards,
    named_tensors,
    resume_schedule,
    schedule_state,
    write_shards,
)
from verl_rc.runtime.distributed.fsdp import gather_full_tensor, local_tensor, shard_model
from verl_rc.runtime.distributed.process_group import DeviceMesh, leave_trainer_group
from verl_rc.runtime.workers.float16 import LossScale, require_float16_products
from verl_rc.runtime.workers.language_model import torch_dtype
from verl_rc.runtime.workers.model_flops import ModelFlops, count_flops


def build_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> AdamW:
    """AdamW over fp32 master weights; the fused kernel where torch has one for the device."""
    trainable = [p for p in parameters if p.requires_grad]
    # fused: one kernel instead of several for each parameter.
    return AdamW(
        trainable,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        weight_decay=config.weight_decay,
        fused=True,
    )


def build_scheduler(optimizer: AdamW, config: OptimConfig, total_steps: int) -> LambdaLR:
    """Linear warm-up, then constant, linear decay or cosine decay to ``min_lr_ratio`` of the peak at
    ``total_steps``."""
    warmup = (
        config.lr_warmup_steps
        if config.lr_warmup_steps >= 0
        else int(config.lr_warmup_steps_ratio * total_steps)
    )

    def factor(step: int) -> float:
        if step < warmup:
            # From 1, not 0: at a rate of 0 the first step would change nothing.
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


class ShardedModel:
    """Fp32 master weights in FSDP2 shards. Code that needs the weights runs inside ``in_use``."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, fsdp: FsdpConfig) -> None:
        """Shard ``module`` over ``mesh``."""
        self._device = torch.device(mesh.device_type)
        self._fsdp = fsdp
        self._shards = shard_model(
            module, mesh, torch_dtype(fsdp.dtype), reshard_after_forward=fsdp.reshard_after_forward
        )
        self.module = module
        """The same module as the shards, seen as a model."""

    def count_flops(self) -> ModelFlops:
        """The FLOPs of the model and of the rank's device."""
        return count_flops(self.module, torch_dtype(self._fsdp.dtype), self._device)

    @contextmanager
    def in_use(self) -> Iterator[nn.Module]:
        """Weights on the device inside the context.

        After it ``*_offload`` moves them to host memory, and unused device memory is released for the
        engines on this GPU, which are other processes.
        """
        if self._device.type != "cpu" and self._fsdp.param_offload:
            self.module.to(self._device)
        try:
            yield self.module
        finally:
            self._offload()

    def _offload(self) -> None:
        if self._device.type == "cpu":
            return
        if self._fsdp.param_offload:
            self.module.to("cpu")
        # PyTorch caches freed memory: after an update, several times the memory of the rank's tensors.
        torch.cuda.empty_cache()


class FrozenModel(ShardedModel):
    """A model that does not learn."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, fsdp: FsdpConfig) -> None:
        """Shard ``module`` over ``mesh``."""
        super().__init__(module, mesh, fsdp)
        module.requires_grad_(False)
        self._offload()

    def copy_from(self, model: ShardedModel) -> None:
        """Take the weights of a model of the same architecture in the same shards."""
        with model.in_use() as source, self.in_use() as target, torch.no_grad():
            weights = named_tensors(source)
            for name, tensor in named_tensors(target).items():
                local_tensor(tensor).copy_(local_tensor(weights[name]))

    def save(self, folder: Path) -> None:
        """Write the shards below ``folder``; collective."""
        with self.in_use() as module:
            write_shards(folder, collect_shards(module, _no_optimizer(), {}))

    def load(self, folder: Path) -> None:
        """Restore a ``save`` by any number of ranks; collective. Raises ``CheckpointError`` when it does not
        fit."""
        with self.in_use() as module:
            load_shards(folder, module, _no_optimizer())


def _no_optimizer() -> torch.optim.Optimizer:
    """An optimizer of no parameters, for shards of a model that does not learn."""
    return torch.optim.SGD([{"params": []}], lr=0.0)


class LearningModel(ShardedModel):
    """A model with AdamW and a schedule of its learning rate."""

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        config: ActorConfig | CriticConfig,
        total_steps: int,
        async_save: bool = False,
    ) -> None:
        """Shard ``module`` over ``mesh``. ``total_steps`` bounds the learning-rate schedule. ``async_save``:
        checkpoints are written in the background."""
        compute_dtype, device = torch_dtype(config.fsdp_config.dtype), torch.device(mesh.device_type)
        require_float16_products(compute_dtype, device)
        # Sharded before the optimizer is built: its moments are then sharded like the parameters.
        super().__init__(module, mesh, config.fsdp_config)
        self._loss_scale = LossScale(compute_dtype, device)
        self._offloads_moments = device.type != "cpu" and config.fsdp_config.optimizer_offload
        self._whole_gradients = config.fsdp_config.use_no_sync_for_gradient_accumulation is not False
        self.optimizer = build_optimizer(module.parameters(), config.optim)
        self._scheduler = build_scheduler(self.optimizer, config.optim, total_steps)
        self._clip_grad = config.optim.clip_grad
        self._writer = BackgroundWriter(self._device.type == "cuda") if async_save else None
        self._offload()

    @contextmanager
    def in_use(self, with_optimizer: bool = False) -> Iterator[nn.Module]:
        """See ``ShardedModel``; ``with_optimizer`` brings AdamW's moments to the device too, which take twice
        the memory of the weights."""
        if with_optimizer and self._offloads_moments:
            self._move_moments(self._device)
        with super().in_use() as module:
            yield module

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether the next backward reduces gradients over ranks; without
        ``use_no_sync_for_gradient_accumulation`` every one does."""
        self._shards.set_requires_gradient_sync(enabled or not self._whole_gradients)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, multiplied by the loss scale; ``step`` divides by it."""
        self._loss_scale.scale(loss).backward()

    def step(self, learning_rate_factor: float = 1.0) -> OptimizerStep:
        """Clip the gradient and take an optimizer step with a part of the schedule's learning rate; skip it
        where the gradient is not finite."""
        self._loss_scale.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._clip_grad)
        # The norm of sharded gradients is a DTensor with this rank's part of it. Gathered, it is the same on
        # all ranks, which then skip, or take, the step together.
        step = OptimizerStep(float(gather_full_tensor(norm)), self._loss_scale.value)
        # clip_grad_norm_ has multiplied all gradients by max_norm / norm: a norm of NaN has made all of them
        # NaN.
        if step.outcome == "trained":
            rates = self._scheduler.get_last_lr()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate_factor
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._loss_scale.adjust()
        return step

    def advance_schedule(self) -> float:
        """End a training step; returns the learning rate it had."""
        rate = float(self._scheduler.get_last_lr()[0])
        self._scheduler.step()
        return rate

    def save(self, folder: Path) -> None:
        """Write shards, moments, schedule and loss scale below ``folder``; collective. With ``async_save``
        they are copied now and written in the background."""
        # Frozen weights are those of the base model and are not written.
        adapters_only = any(not parameter.requires_grad for parameter in self.module.parameters())
        with self.in_use(with_optimizer=True):
            extra = {"schedule": schedule_state(self._scheduler), "loss_scale": self._loss_scale.state_dict()}
            shards = collect_shards(self.module, self.optimizer, extra, adapters_only)
            if self._writer is None:
                write_shards(folder, shards)
            else:
                self._writer.start(folder, shards)

    def has_saved(self, wait: bool) -> bool:
        """Whether the last save is on disk; ``wait`` until it is. Raises ``CheckpointError`` when it cannot
        be written."""
        return self._writer is None or self._writer.is_finished(wait)

    def load(self, folder: Path) -> None:
        """Restore a ``save`` by any number of ranks; collective. Raises ``CheckpointError`` when it does not
        fit."""
        with self.in_use(with_optimizer=True):
            extra = load_shards(folder, self.module, self.optimizer)
        resume_schedule(self._scheduler, extra["schedule"])
        self._loss_scale.resume(extra.get("loss_scale", {}))

    def _offload(self) -> None:
        if self._offloads_moments:
            self._move_moments(torch.device("cpu"))
        super()._offload()

    def _move_moments(self, device: torch.device) -> None:
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    # The step counter moves too: the fused kernel wants it beside the moments.
                    state[name] = value.to(device, non_blocking=True)


class Learner:
    """One rank of a model that learns."""

    model: LearningModel
    """Weights, moments and schedule."""

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint, or with ``checkpoint.async_save`` begin to; collective."""
        self.model.save(folder)

    def has_saved(self, wait: bool) -> bool:
        """Whether the last checkpoint is written; ``wait`` until it is. Raises ``CheckpointError`` when it
        cannot be."""
        return self.model.has_saved(wait)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint; collective."""
        self.model.load(folder)

    def count_flops(self) -> ModelFlops:
        """The FLOPs of the model and of the rank's device."""
        return self.model.count_flops()

    def close(self) -> None:
        """Leave the process groups."""
        leave_trainer_group()
