"""One rank of the critic: computes values and learns them."""

from collections.abc import Sequence

from torch import Tensor

from verl_rc.algorithm.losses import Aggregation
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.algorithm.ppo.objective import Objective, value_objective
from verl_rc.config.models import recomputes_activations
from verl_rc.config.run import RunConfig
from verl_rc.metrics import Metric, Reduction
from verl_rc.records.batches import CriticBatch, TokenBatch
from verl_rc.records.ragged import Column, Ragged
from verl_rc.runtime.distributed.fsdp import sharding_mesh
from verl_rc.runtime.distributed.process_group import RankAddress, join_trainer_group, trainer_device
from verl_rc.runtime.distributed.sequence_parallel import divide_ranks
from verl_rc.runtime.workers.activation_offload import offload_layer_inputs
from verl_rc.runtime.workers.forward import ForwardOptions, score_values
from verl_rc.runtime.workers.language_model import load_value_model, torch_dtype
from verl_rc.runtime.workers.micro_batches import (
    ObjectiveTotals,
    accumulate_gradients,
    score_sequences,
    select_sequences,
)
from verl_rc.runtime.workers.packing import PrefixSharing
from verl_rc.runtime.workers.sharded_model import Learner, LearningModel
from verl_rc.runtime.workers.updates import UpdateReport


class CriticWorker(Learner):
    """The critic's model on one rank: FSDP2 shards, fp32 master weights, AdamW."""

    def __init__(self, config: RunConfig, address: RankAddress, total_steps: int) -> None:
        """Join the trainer group, load the model and shard it. ``total_steps`` bounds the learning-rate
        schedule."""
        self._config, policy = config.critic, config.actor_rollout_ref
        model = config.critic.model
        self._address = address
        self._device = trainer_device(config.trainer.device)
        mesh = sharding_mesh(join_trainer_group(address, self._device), self._config.fsdp_config.fsdp_size)
        module = load_value_model(
            model.path,
            torch_dtype(self._config.fsdp_config.model_dtype),
            recomputes_activations(model, self._device.type == "cuda"),
            model.trust_remote_code,
            mesh,
        )
        if model.enable_activation_offload:
            offload_layer_inputs(module, self._device.type)
        async_save = policy.actor.checkpoint.async_save
        self.model = LearningModel(module, mesh, self._config, total_steps, async_save)
        _, sharing = divide_ranks(mesh, self._config.fsdp_config.ulysses_sequence_parallel_size)
        self._forward = ForwardOptions(
            remove_padding=policy.model.use_remove_padding,
            ranks=sharing,
            prefixes=PrefixSharing() if policy.shares_prefixes else None,
        )
        self._loss_scale_factor = float(config.data.max_response_length)

    def compute_values(
        self, tokens: Ragged[TokenBatch], micro_batches: Sequence[Sequence[int]]
    ) -> list[Column]:
        """The value before each response token of the given rows, without gradient."""
        with self.model.in_use() as module:
            module.eval()
            return score_sequences(tokens, micro_batches, lambda part: [self._values(part)], self._device)

    def update(self, batch: Ragged[CriticBatch], mini_batches: Sequence[MiniBatch]) -> UpdateReport:
        """One optimizer step per mini-batch."""
        totals = ObjectiveTotals("critic")
        with self.model.in_use(with_optimizer=True) as module:
            module.train()
            for share in mini_batches:
                # A global count: all ranks skip a mini-batch together, or FSDP's collectives would no longer
                # match.
                if share.num_loss_tokens:
                    self.accumulate(batch, share, totals)
                    totals.steps.append(self.model.step())
        # The rate that this step had; advancing the schedule returns it before it moves on.
        learning_rate = Metric("critic/lr", self.model.advance_schedule(), Reduction.LAST)
        return UpdateReport(
            [learning_rate, *totals.metrics(is_first_rank=self._address.rank == 0)], totals.steps
        )

    def accumulate(self, batch: Ragged[CriticBatch], share: MiniBatch, totals: ObjectiveTotals) -> None:
        """Gradients of one mini-batch."""
        aggregation = Aggregation(
            self._config.loss_agg_mode,
            num_tokens=share.num_tokens,
            num_sequences=share.num_sequences,
            loss_scale_factor=self._loss_scale_factor,
        )

        def compute_objective(rows: Sequence[int]) -> Objective:
            part = select_sequences(batch, rows, self._device)
            return value_objective(self._values(part.tokens), part, self._config, aggregation)

        accumulate_gradients(
            self.model, share.micro_batches, compute_objective, self._address.world_size, totals
        )

    def _values(self, tokens: TokenBatch) -> Tensor:
        return score_values(self.model.module, tokens, self._forward)
