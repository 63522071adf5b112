"""One rank of the actor: scores tokens, updates the policy, sends its weights."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from verl_rc.config.run import RunConfig
from verl_rc.data.batches import TokenBatch, TokenScores, TrainBatch
from verl_rc.distributed.fsdp import gather_full_tensor, shard_model
from verl_rc.distributed.mesh import RankAddress, join_trainer_group, leave_trainer_group, trainer_device
from verl_rc.losses import Aggregation
from verl_rc.metrics import Metric, Reduction
from verl_rc.ppo.mini_batches import MiniBatchShare
from verl_rc.ppo.objective import Objective, policy_objective
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.sender import SendReceipt, WeightSender
from verl_rc.weight_sync.transfer_group import TransferAddress
from verl_rc.workers.accumulate import ObjectiveTotals
from verl_rc.workers.forward import ForwardOptions, score_tokens
from verl_rc.workers.language_model import load_causal_lm
from verl_rc.workers.optimizer import build_optimizer, build_scheduler

Record = TypeVar("Record", TokenBatch, TrainBatch)


class PolicyWorker:
    """The actor's model on one rank: FSDP2 shards, fp32 master weights, AdamW."""

    def __init__(self, config: RunConfig, address: RankAddress, total_steps: int) -> None:
        """Join the trainer group, load the model and shard it. ``total_steps`` bounds the learning-rate schedule."""
        model_config, self._actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
        self._address = address
        self._correction = config.algorithm.rollout_correction
        self._device = trainer_device(config.trainer.device)
        self._mesh = join_trainer_group(address, self._device)
        fsdp = self._actor.fsdp_config
        model = load_causal_lm(
            model_config.path,
            getattr(torch, _TORCH_DTYPES[fsdp.model_dtype]),
            model_config.enable_gradient_checkpointing,
            model_config.trust_remote_code,
        ).to(self._device)
        compute_dtype = getattr(torch, _TORCH_DTYPES[fsdp.dtype])
        self._shards = shard_model(model, self._mesh, compute_dtype, fsdp.reshard_after_forward)
        self.model = model
        """The same module as the shards, seen as a model."""
        self.optimizer = build_optimizer(model.parameters(), self._actor.optim)
        self._scheduler = build_scheduler(self.optimizer, self._actor.optim, total_steps)
        self._forward = ForwardOptions(config.actor_rollout_ref.rollout.temperature, model_config.use_remove_padding)
        self._response_width = config.data.max_response_length
        rollout = config.actor_rollout_ref.rollout
        self._sender = WeightSender(
            model,
            address.rank,
            _TORCH_DTYPES[rollout.dtype],
            rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
        )

    def compute_log_probs(self, tokens: TokenBatch, micro_batches: Sequence[Sequence[int]]) -> TokenScores:
        """Log-probs and entropys ``[B, R]`` of the given rows' response tokens, without gradient."""
        self.model.eval()
        shape = tokens.responses.shape
        log_probs, entropys = torch.zeros(shape), torch.zeros(shape)
        with torch.no_grad():
            for rows in micro_batches:
                part = self._to_device(tokens[list(rows) or [0]])
                scores = score_tokens(self.model, part, self._forward, with_entropy=True)
                if rows:
                    assert scores.entropys is not None
                    log_probs[list(rows)], entropys[list(rows)] = scores.log_probs.cpu(), scores.entropys.cpu()
        return TokenScores(log_probs, entropys)

    def update(self, batch: TrainBatch, mini_batches: Sequence[MiniBatchShare]) -> list[Metric]:
        """One optimizer step per mini-batch; returns the actor's metrics, to be reduced over ranks."""
        self.model.train()
        totals = ObjectiveTotals(num_updates=len(mini_batches))
        for share in mini_batches:
            if share.num_loss_tokens == 0:
                totals.add_skipped()
                continue
            self.accumulate_gradients(batch, share, totals)
            totals.add_grad_norm(self._step())
        learning_rate = float(self._scheduler.get_last_lr()[0])
        self._scheduler.step()
        lr = Metric("actor/lr", learning_rate, Reduction.LAST)
        return [lr, *totals.metrics(is_first_rank=self._address.rank == 0)]

    def accumulate_gradients(self, batch: TrainBatch, share: MiniBatchShare, totals: ObjectiveTotals) -> None:
        """Forward and backward over this rank's micro-batches; gradients meet the other ranks' only in the last one.

        FSDP averages gradients over ranks, the losses are shares of a sum: hence the factor of the number of ranks.
        """
        for index, rows in enumerate(share.micro_batches):
            self._shards.set_requires_gradient_sync(index == len(share.micro_batches) - 1)
            objective = self._objective(batch, rows, share)
            (objective.loss * self._address.world_size).backward()
            totals.add(objective)

    def _objective(self, batch: TrainBatch, rows: list[int], share: MiniBatchShare) -> Objective:
        part: TrainBatch = self._to_device(batch[rows or [0]])
        if not rows:
            part.loss_mask = torch.zeros_like(part.loss_mask)
        scores = score_tokens(self.model, part.tokens, self._forward, with_entropy=self._actor.entropy_coeff != 0)
        aggregation = Aggregation(
            self._actor.loss_agg_mode,
            num_tokens=share.num_tokens,
            num_sequences=share.num_sequences,
            loss_scale_factor=self._actor.loss_scale_factor or self._response_width,
        )
        return policy_objective(
            scores.log_probs, scores.entropys, part, self._actor, aggregation, self._correction.rejection_denominator
        )

    def _step(self) -> float:
        """Clip and step; a gradient that is not finite is dropped instead. Returns the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._actor.optim.clip_grad)
        grad_norm = float(gather_full_tensor(norm))
        if torch.isfinite(torch.tensor(grad_norm)):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return grad_norm

    def _to_device(self, record: Record) -> Record:
        return record if self._device.type == "cpu" else record.to(self._device)

    def manifest(self) -> Manifest:
        """What every weight update consists of."""
        return self._sender.manifest

    def join_transfer(self, address: TransferAddress) -> None:
        """Open the way to the engines."""
        self._sender.join(address, "gloo" if self._device.type == "cpu" else "nccl")

    def send_weights(self) -> SendReceipt:
        """Send the current weights to all engines."""
        return self._sender.send()

    def close(self) -> None:
        """Leave the process groups."""
        leave_trainer_group()


_TORCH_DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
