"""One rank of a policy: the actor scores tokens, updates its weights and sends them; frozen policies only
score."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from verl_rc.algorithm.losses import Aggregation, MiniBatchStatistics, mini_batch_statistics
from verl_rc.algorithm.ppo.choices import mini_batch_loss_name
from verl_rc.algorithm.ppo.in_actor import MiniBatchCorrection, OverRanks
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.algorithm.ppo.objective import Objective, policy_objective, statistics_inputs
from verl_rc.config.models import recomputes_activations
from verl_rc.config.run import RunConfig
from verl_rc.metrics import Mean, Metric, Reduction
from verl_rc.records.batches import TokenBatch, TokenScores, TrainBatch
from verl_rc.records.heads import heads
from verl_rc.records.ragged import Column, Ragged
from verl_rc.runtime.distributed.fsdp import sharding_mesh
from verl_rc.runtime.distributed.process_group import (
    RankAddress,
    all_gather_vector,
    all_reduce_max,
    all_reduce_sum,
    join_trainer_group,
    trainer_device,
)
from verl_rc.runtime.distributed.sequence_parallel import divide_ranks
from verl_rc.runtime.weight_sync.manifest import Manifest
from verl_rc.runtime.weight_sync.proof import LogProbGap
from verl_rc.runtime.weight_sync.sender import SendReceipt, WeightSender
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle
from verl_rc.runtime.weight_sync.survival import EngineRounding, UpdateSurvival
from verl_rc.runtime.weight_sync.transfer_group import TransferAddress
from verl_rc.runtime.workers.activation_offload import offload_layer_inputs
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.host import host_memory
from verl_rc.runtime.workers.language_model import Products, load_causal_lm, torch_dtype
from verl_rc.runtime.workers.lora import adapters_off, add_adapters, engine_weights, linear_weights
from verl_rc.runtime.workers.micro_batches import (
    ObjectiveTotals,
    accumulate_gradients,
    score_sequences,
    select_sequences,
)
from verl_rc.runtime.workers.packing import PrefixSharing
from verl_rc.runtime.workers.rounding import rounding_of_log_probs, unit_of
from verl_rc.runtime.workers.router_replay import RouterReplay
from verl_rc.runtime.workers.sharded_model import FrozenModel, Learner, LearningModel
from verl_rc.runtime.workers.updates import ActorReport, UpdateRequest
from verl_rc.runtime.workers.vision import freeze_tower, require_frozen_tower

_GIB = 1 << 30


def memory_metrics(device: torch.device) -> list[Metric]:
    """``perf/*memory*`` in GiB, the maximum over ranks; newer releases of verl call them ``actor/perf/*``."""
    memory = host_memory()
    sizes = {"perf/cpu_memory_used_gb": memory["MemTotal"] - memory["MemAvailable"]}
    if device.type == "cuda":
        sizes["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device)
        sizes["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device)
    return [Metric(name, size / _GIB, Reduction.MAX) for name, size in sizes.items()]


class PolicyWorker(Learner):
    """The actor's model on one rank: FSDP2 shards, fp32 master weights, AdamW."""

    def __init__(self, config: RunConfig, address: RankAddress, total_steps: int) -> None:
        """Join the trainer group, load the model and shard it. ``total_steps`` bounds the learning-rate
        schedule."""
        model_config = config.actor_rollout_ref.model
        self._actor = config.actor_rollout_ref.actor
        self._address = address
        self._correction = config.algorithm.rollout_correction
        self._distillation = config.distillation.loss
        self._needs_sum_pi_squared = (
            config.algorithm.estimator_reads("sum_pi_squared") or self._correction.diagnostics == "full"
        )
        self._device = trainer_device(config.trainer.device)
        self._mesh = join_trainer_group(address, self._device)
        fsdp = self._actor.fsdp_config
        shards = sharding_mesh(self._mesh, fsdp.fsdp_size)
        module = load_causal_lm(
            model_config.path,
            torch_dtype(fsdp.model_dtype),
            recomputes_activations(model_config, self._device.type == "cuda"),
            model_config.trust_remote_code,
            shards,
            Products(
                model_config.head_dtype,
                torch_dtype(fsdp.dtype) if config.actor_rollout_ref.exact else None,
            ),
            config.data.mm_processor_kwargs,
        )
        if self._actor.freeze_vision_tower:
            freeze_tower(module)
        if model_config.enable_activation_offload:
            offload_layer_inputs(module, self._device.type)
        is_replayed = config.actor_rollout_ref.rollout.enable_rollout_routing_replay
        replay = RouterReplay(module) if is_replayed else None
        module, async_save = add_adapters(module, model_config), self._actor.checkpoint.async_save
        if self._actor.freeze_vision_tower:
            require_frozen_tower(module)
        self.model = LearningModel(module, shards, self._actor, total_steps, async_save)
        # Rows are spread over this mesh: ranks that share tokens have the same rows.
        self._data_parallel, sharing = divide_ranks(self._mesh, fsdp.ulysses_sequence_parallel_size)
        self._ranks = OverRanks(
            partial(all_reduce_sum, mesh=self._data_parallel),
            partial(all_reduce_max, mesh=self._data_parallel),
        )
        self._forward = ForwardOptions(
            config.actor_rollout_ref.rollout.temperature,
            model_config.use_remove_padding,
            entropy_gradient=config.has_entropy_bonus,
            ranks=sharing,
            prefixes=PrefixSharing() if config.actor_rollout_ref.shares_prefixes else None,
            replay=replay,
        )
        self._weights_in_use = ExitStack()
        self._statistics_seconds = 0.0
        rollout = config.actor_rollout_ref.rollout
        module = self.model.module
        self._weights = engine_weights(module, model_config)
        self._unit = unit_of(torch_dtype(rollout.dtype), torch_dtype(fsdp.dtype))
        self._rounding = EngineRounding(
            torch_dtype(rollout.dtype), rollout.quantization, linear_weights(module)
        )
        self._sender = WeightSender(
            self._weights,
            address.rank,
            self._device,
            rollout.dtype,
            rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
        )

    def compute_log_probs(
        self, tokens: Ragged[TokenBatch], micro_batches: Sequence[Sequence[int]]
    ) -> list[Column]:
        """Log-probs and entropies of the response tokens, without gradient; sums of squared probabilities and
        varentropies too, where the estimator or full diagnostics need them."""
        with self.model.in_use() as module:
            module.eval()
            return score_sequences(tokens, micro_batches, self._scores, self._device)

    def estimate_rounding(
        self, tokens: Ragged[TokenBatch], micro_batches: Sequence[Sequence[int]]
    ) -> list[Column]:
        """How far rounding moves the log-prob of each response token, nats, in the less precise one of engine
        and trainer."""
        with self.model.in_use() as module:
            module.eval()
            return score_sequences(
                tokens,
                micro_batches,
                lambda part: [rounding_of_log_probs(module, part, self._forward, self._unit)],
                self._device,
            )

    def compute_reference_log_probs(
        self, tokens: Ragged[TokenBatch], micro_batches: Sequence[Sequence[int]]
    ) -> list[Column]:
        """Log-probs of the response tokens under the model without its LoRA adapters, without gradient."""
        with self.model.in_use() as module, adapters_off(module):
            module.eval()
            return score_sequences(
                tokens,
                micro_batches,
                lambda part: [score_tokens(module, part, self._forward, with_entropy=False).log_probs],
                self._device,
            )

    def _scores(self, tokens: TokenBatch) -> list[Tensor]:
        squares = self._needs_sum_pi_squared
        scores = score_tokens(
            self.model.module, tokens, self._forward, with_entropy=True, with_sum_pi_squared=squares
        )
        optional = (scores.entropies, scores.sum_pi_squared, scores.varentropies)
        return [scores.log_probs, *(values for values in optional if values is not None)]

    def update(
        self, batch: Ragged[TrainBatch], mini_batches: Sequence[MiniBatch], request: UpdateRequest
    ) -> ActorReport:
        """One optimizer step per mini-batch, in their order.

        Raises, where the actor corrects, ``SyncProofError`` before the first of these steps, and
        ``NonFiniteLogProbError`` before that of the mini-batch with such log-probs.
        """
        correction = request.corrector.during_update(request.policy_version, len(mini_batches), self._ranks)
        totals = ObjectiveTotals("actor")
        loss_tokens = []
        self._actor = request.options_of_step(self._actor)
        self._statistics_seconds = 0.0
        with self.model.in_use(with_optimizer=True) as module:
            module.train()
            survival = UpdateSurvival(self._weights.trained()) if request.measures_survival else None
            for share in mini_batches:
                # A global count, so that all ranks skip together and FSDP's collectives match.
                if share.num_loss_tokens == 0:
                    loss_tokens.append(0)
                    continue
                self.accumulate(batch, share, totals, correction)
                num_loss_tokens = correction.end_mini_batch(share, totals.num_updates)
                if request.gap_limit is not None and not totals.num_updates:
                    gap = LogProbGap.from_statistics(correction.before_update)
                    if gap is not None:
                        # Before the optimizer step: weights that were trained on the rollouts of other
                        # weights cannot be repaired.
                        gap.require_at_most(request.gap_limit, "this step's rollouts")
                loss_tokens.append(num_loss_tokens)
                if num_loss_tokens:
                    totals.steps.append(self.model.step(request.learning_rate_factor))
                else:
                    # A step with gradients of 0 would still change the weights, by AdamW's moments and weight
                    # decay.
                    self.model.optimizer.zero_grad()
            survival_sums = (
                None if survival is None else survival.sums(self._weights.trained(), self._rounding)
            )
        rate = self.model.advance_schedule() * request.learning_rate_factor
        records = [Metric("actor/lr", rate, Reduction.LAST)]
        records += totals.metrics(is_first_rank=self._address.rank == 0)
        records += memory_metrics(self._device)
        if self._forward.prefixes is not None:
            records.append(Metric("perf/shared_tokens_fraction", self._forward.prefixes.take_fraction()))
        if survival_sums is not None:
            projection, squared_norm, num_changed_in_engine, num_changed = survival_sums.tolist()
            records.append(Metric("sync/update_survival", Mean(projection, squared_norm)))
            records.append(Metric("sync/changed_weights", Mean(num_changed_in_engine, num_changed)))
        if self._address.rank == 0:
            # The counts are global: summed over ranks, each skip would count once a rank.
            skipped = sum(num_loss_tokens == 0 for num_loss_tokens in loss_tokens)
            records.append(Metric("rollout_corr/skipped_updates", skipped, Reduction.SUM))
        seconds = self._statistics_seconds + correction.seconds
        if seconds:  # the loss, or its correction, has read a whole mini-batch first
            records.append(Metric("timing_s/correction_statistics", seconds, Reduction.MAX))
        return ActorReport(records, totals.steps, loss_tokens, correction.measured())

    def accumulate(
        self,
        batch: Ragged[TrainBatch],
        share: MiniBatch,
        totals: ObjectiveTotals,
        correction: MiniBatchCorrection,
    ) -> None:
        """Add the gradients of one mini-batch; collective."""
        num_tokens, num_sequences = correction.begin_mini_batch(
            share, totals.num_updates, lambda rows: self._current_log_probs(batch, rows)
        )
        mini_batch = self._mini_batch_statistics(batch, share, correction)
        aggregation = Aggregation(
            self._actor.loss_agg_mode,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            loss_scale_factor=self._actor.loss_scale_factor,
        )

        def compute_objective(rows: Sequence[int]) -> Objective:
            part = select_sequences(batch, rows, self._device)
            current = self.score(part, correction.reads_entropies, correction.reads_squares)
            part, averages = correction.correct(part, current)
            objective = policy_objective(
                current, part, self._actor, self._correction, aggregation, mini_batch, self._distillation
            )
            return replace(objective, averages={**objective.averages, **averages})

        accumulate_gradients(
            self.model, share.micro_batches, compute_objective, self._address.world_size, totals
        )

    def score(
        self, part: TrainBatch, with_entropy: bool = False, with_sum_pi_squared: bool = False
    ) -> TokenScores:
        """Current log-probs of a micro-batch; entropies too where the loss needs them, and with a gradient
        log-probs of the teacher's or the sampler's most likely tokens where the loss reads them."""
        candidate_ids = None
        if torch.is_grad_enabled() and part.tokens.head_counts is not None:
            assert part.tokens.head_ids is not None
            candidate_ids, _ = heads(part.tokens.head_counts, part.tokens.head_ids)
        elif torch.is_grad_enabled():
            candidate_ids = part.teacher_top_ids
        return score_tokens(
            self.model.module,
            part.tokens,
            self._forward,
            with_entropy or self._actor.entropy_coeff != 0,
            with_sum_pi_squared,
            candidate_ids=candidate_ids,
        )

    def _mini_batch_statistics(
        self, batch: Ragged[TrainBatch], share: MiniBatch, correction: MiniBatchCorrection
    ) -> MiniBatchStatistics | None:
        """Statistics of the whole mini-batch, from a pass without gradient; None for losses that do not read
        them. Collective."""
        name = mini_batch_loss_name(self._actor, self._correction)
        if name is None:
            return None
        started = time.perf_counter()
        inputs = []
        for rows in share.micro_batches:
            part, log_probs = self._current_log_probs(batch, rows)
            corrected = correction.preview(part, log_probs)
            inputs.append(statistics_inputs(corrected, log_probs, self._actor, self._correction))
        statistics = mini_batch_statistics(
            name,
            inputs,
            partial(all_reduce_sum, mesh=self._data_parallel),
            partial(all_gather_vector, mesh=self._data_parallel),
        )
        self._statistics_seconds += time.perf_counter() - started
        return statistics

    def _current_log_probs(self, batch: Ragged[TrainBatch], rows: Sequence[int]) -> tuple[TrainBatch, Tensor]:
        part = select_sequences(batch, rows, self._device)
        with torch.no_grad():
            return part, self.score(part).log_probs

    def manifest(self, full: bool = True) -> Manifest:
        """The tensors of a weight update: all (``full``), or those that training changes."""
        return self._sender.update_manifest(full)

    def join_transfer(self, address: TransferAddress) -> None:
        """Join the transfer group of the engines."""
        # NCCL moves GPU tensors alone; on a CPU gloo does it.
        self._sender.join(address, "gloo" if self._device.type == "cpu" else "nccl")

    def send_weights(self, full: bool = True) -> SendReceipt:
        """Broadcast the current weights to all engines; collective."""
        with self.model.in_use():
            return self._sender.send(full)

    def describe_buckets(self, full: bool = True) -> tuple[str, int]:
        """The device whose memory this rank can lend, and the number of buckets of a weight update."""
        return self._sender.device_key(), self._sender.num_buckets(full)

    def offer_bucket(self, index: int, share: bool, full: bool = True) -> BucketHandle:
        """Lend one bucket of the current weights to the engine worker on this device; collective.

        The weights stay on the device until ``release_bucket``.
        """
        # Offloaded weights must stay on the device between the calls of one update.
        if index == 0:
            self._weights_in_use.enter_context(self.model.in_use())
        return self._sender.offer(index, share, full)

    def release_bucket(self, interrupted: bool) -> SendReceipt:
        """Free the last bucket and end the weight update, which the loss of an engine may have
        ``interrupted``."""
        with self._weights_in_use:  # the bucket is freed first, so that its memory is given back too
            return self._sender.release(interrupted)


class FrozenWorker:
    """A policy that only scores on one rank: frozen FSDP2 shards."""

    def __init__(
        self, config: RunConfig, address: RankAddress, total_steps: int, role: str = "reference"
    ) -> None:
        """Join the trainer group, load the model of ``role`` in ``RunConfig.frozen_policies`` and shard it;
        ``total_steps`` means nothing to a frozen model."""
        del total_steps
        model, policy = config.actor_rollout_ref.model, config.frozen_policies[role]
        fsdp = policy.config.fsdp_config
        self._device = trainer_device(config.trainer.device)
        mesh = sharding_mesh(join_trainer_group(address, self._device), fsdp.fsdp_size)
        module = load_causal_lm(
            policy.model_path,
            torch_dtype(fsdp.model_dtype),
            gradient_checkpointing=False,
            trust_remote_code=model.trust_remote_code,
            mesh=mesh,
            products=Products(
                model.head_dtype, torch_dtype(fsdp.dtype) if config.actor_rollout_ref.exact else None
            ),
            pixel_limits=config.data.mm_processor_kwargs,
        )
        self.model = FrozenModel(module, mesh, fsdp)
        self._top_tokens = 0 if role == "reference" else config.distillation.top_tokens
        _, sharing = divide_ranks(mesh, fsdp.ulysses_sequence_parallel_size)
        self._forward = ForwardOptions(
            config.actor_rollout_ref.rollout.temperature,
            model.use_remove_padding,
            ranks=sharing,
            prefixes=PrefixSharing() if config.actor_rollout_ref.shares_prefixes else None,
        )

    def compute_log_probs(
        self, tokens: Ragged[TokenBatch], micro_batches: Sequence[Sequence[int]]
    ) -> list[Column]:
        """Log-probs of the response tokens; of a teacher whose most likely tokens the loss reads, their ids
        and log-probs too."""

        def score(part: TokenBatch) -> list[Tensor]:
            scores = score_tokens(
                self.model.module, part, self._forward, with_entropy=False, top_tokens=self._top_tokens
            )
            optional = (scores.top_ids, scores.top_log_probs)
            return [scores.log_probs, *(values for values in optional if values is not None)]

        with self.model.in_use() as module:
            # No dropout: the divergence from the policy would be noise.
            module.eval()
            return score_sequences(tokens, micro_batches, score, self._device)


class ReferenceWorker(FrozenWorker):
    """The reference policy, which may become the actor from time to time and is saved then."""

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint; collective."""
        self.model.save(folder)

    def has_saved(self, wait: bool) -> bool:
        """True: ``save`` does not write in the background."""
        return True

    def load(self, folder: Path) -> None:
        """Restore a checkpoint; collective."""
        self.model.load(folder)
