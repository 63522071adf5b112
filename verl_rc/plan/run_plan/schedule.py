"""The stages of a step, how often each runs, and on how many rows."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl_rc.algorithm.ppo.choices import update_limit
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.models import LearnerFsdpConfig, torch_name
from verl_rc.config.run import RunConfig
from verl_rc.plan.run_plan.objective import PolicyPlan
from verl_rc.records.microbatch import MicroBatchLimit


@dataclass(frozen=True)
class LongestRows:
    """Rows of the greatest lengths, as tokens that are computed."""

    prompt: int
    response: int
    siblings: int
    """Rows of which a micro-batch computes the prompt once; 1 where each has its own."""

    @classmethod
    def of(cls, config: RunConfig, role: str) -> "LongestRows":
        """Those that the configuration allows in the actor or critic."""
        policy, data = config.actor_rollout_ref, config.data
        replays = role == "actor" and policy.rollout.enable_rollout_routing_replay
        siblings = policy.rollout.n if policy.shares_prefixes and not replays else 1
        return cls(data.max_prompt_length, config.longest_sequence - data.max_prompt_length, siblings)

    def tokens(self, rows: int) -> int:
        """Most tokens of a micro-batch of ``rows`` that follow each other."""
        aligned = self.siblings % rows == 0 or rows % self.siblings == 0
        prompts = -(-rows // self.siblings) if aligned else (rows - 2) // self.siblings + 2
        return prompts * self.prompt + rows * self.response

    def fitting(self, tokens: int) -> int:
        """The rows that fit into ``tokens``, siblings together; at least one is computed."""
        families, rest = divmod(tokens, self.tokens(self.siblings))
        return max(1, families * self.siblings + max(0, (rest - self.prompt) // self.response))


@dataclass(frozen=True)
class UpdateArithmetic:
    """The cut of a train batch into optimizer steps of one role; sizes are those of the whole mini-batch,
    over all ranks."""

    mini_batch_prompts: int
    mini_batch_rows: int
    mini_batches_per_epoch: int
    epochs: int
    ranks: int
    max_tokens: int | None
    """Tokens of a micro-batch on one rank. None means limited by rows."""
    max_rows: int | None
    """Rows of a micro-batch. None means limited by tokens."""
    ranks_per_group: int = 1
    """Ranks that share the tokens of a micro-batch."""
    sums_gradients_once: bool | None = None
    """Whether ranks reduce gradients once a mini-batch, not after every micro-batch. None if the estimate of
    memory decides."""
    ranks_per_copy: int = 1
    """Ranks that share one copy of weights and moments."""
    scales_loss: bool = False
    """Whether the loss has a dynamic scale, as float16 needs it."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of a training step."""
        return self.mini_batches_per_epoch * self.epochs

    @property
    def num_groups(self) -> int:
        """Groups of ranks that share micro-batches; one rank each without sequence parallelism."""
        return self.ranks // self.ranks_per_group

    @property
    def rows_per_group(self) -> tuple[int, int]:
        """Average rows of a mini-batch in a group, rounded down and up; groups are balanced by tokens, not by
        rows."""
        return self.mini_batch_rows // self.num_groups, -(-self.mini_batch_rows // self.num_groups)

    def rows_per_micro_batch(self, longest: LongestRows) -> int:
        """The longest rows that a micro-batch has."""
        limit = (
            self.max_rows or 1
            if self.max_tokens is None
            else longest.fitting(self.max_tokens * self.ranks_per_group)
        )
        return min(limit, self.rows_per_group[1])


@dataclass(frozen=True)
class BatchArithmetic:
    """The path from the rows of a step to updates."""

    critic_only_steps: int
    """Steps in which the actor is not updated."""
    actor: UpdateArithmetic
    critic: UpdateArithmetic | None


@dataclass(frozen=True)
class Phase:
    """A stage of the step, under the name that ``timing_s/*`` uses."""

    name: str
    role: str
    """The role that computes: driver, engines, actor, critic or a frozen policy."""
    forward_rows: int = 0
    """Rows of a forward pass without gradient, per training step."""
    trained_rows: int = 0
    """Rows of a forward and backward pass, per training step; a row counts once for every epoch."""
    schedule: str = ""
    """Steps in which the stage runs; empty for every step."""


def plan_arithmetic(config: RunConfig) -> BatchArithmetic:
    """The cuts that actor and critic make of the rows of a step under ``config``."""
    actor, critic, trainer = config.actor_rollout_ref.actor, config.critic, config.trainer

    def arithmetic(
        mini_batch_prompts: int, epochs: int, limit: MicroBatchLimit, fsdp: LearnerFsdpConfig
    ) -> UpdateArithmetic:
        setting, ranks = fsdp.use_no_sync_for_gradient_accumulation, config.num_ranks
        return UpdateArithmetic(
            mini_batch_prompts=mini_batch_prompts,
            mini_batch_rows=mini_batch_prompts * config.actor_rollout_ref.rollout.n,
            mini_batches_per_epoch=config.data.train_batch_size // mini_batch_prompts,
            epochs=epochs,
            ranks=ranks,
            max_tokens=limit.max_tokens,
            max_rows=limit.max_rows,
            ranks_per_group=fsdp.ulysses_sequence_parallel_size,
            sums_gradients_once=True if setting is None and trainer.device == "cpu" else setting,
            ranks_per_copy=fsdp.ranks_per_copy(ranks),
            scales_loss=torch_name(fsdp.dtype) == "float16",
        )

    warmup = max(trainer.critic_warmup - 1, 0)
    return BatchArithmetic(
        critic_only_steps=warmup
        if trainer.total_training_steps is None
        else min(warmup, trainer.total_training_steps),
        actor=arithmetic(actor.ppo_mini_batch_size, actor.ppo_epochs, update_limit(actor), actor.fsdp_config),
        critic=arithmetic(
            critic.ppo_mini_batch_size, critic.ppo_epochs, update_limit(critic), critic.fsdp_config
        )
        if config.needs_critic
        else None,
    )


def _facts_of_sampling(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.estimator_reads("reward_baselines"):
        yield "with one greedy response for each prompt"
    if algorithm.filter_groups.enable:
        yield "and reward, until enough prompts have samples that differ"


def plan_phases(config: RunConfig, policy: PolicyPlan, sizes: BatchArithmetic) -> Iterator[Phase]:
    """The stages of a training step in their order."""
    trainer, rows = config.trainer, config.rows_per_step
    yield Phase("gen", "engines", schedule="; ".join(_facts_of_sampling(config.algorithm)))
    yield Phase("reward", "driver")
    if most := config.algorithm.max_refills:
        again = f"at most {most} times, with gen and reward again, where rejection leaves nothing of a prompt"
        yield Phase("find_rejected", "actor", forward_rows=rows, schedule=again)
    if policy.mode == "interpolated":
        yield Phase(
            "old_log_prob", "actor", schedule="every 50 steps, to compare interpolated log-probs with"
        )
    elif policy.mode != "bypass":
        yield Phase("old_log_prob", "actor", forward_rows=rows)
    if config.needs_reference:
        role = "reference" if config.has_reference_model else "actor without its adapters"
        yield Phase("ref", role, forward_rows=rows)
    if config.distillation.enabled:
        yield Phase("teacher", "teacher", forward_rows=rows)
    if sizes.critic is not None:
        yield Phase("values", "critic", forward_rows=rows)
    yield Phase("adv", "driver")
    if sizes.critic is not None:
        yield Phase("update_critic", "critic", trained_rows=rows * sizes.critic.epochs)
    trained_rows = rows * sizes.actor.epochs
    from_step = f"from step {trainer.critic_warmup}" if sizes.critic_only_steps else ""
    if policy.statistics_passes:
        yield Phase(
            "correction_statistics",
            "actor",
            forward_rows=trained_rows * policy.statistics_passes,
            schedule=from_step,
        )
    yield Phase("update_actor", "actor", trained_rows=trained_rows, schedule=from_step)
    yield Phase("update_weights", "actor and engines")
    yield from _phases_after_publication(config, sizes)


def _phases_after_publication(config: RunConfig, sizes: BatchArithmetic) -> Iterator[Phase]:
    trainer = config.trainer
    canary_freq = config.actor_rollout_ref.rollout.sync_proof.canary_freq
    yield Phase("sync_canary", "engines and actor", schedule=_frequency_text(canary_freq, "the start"))
    if trainer.test_freq > 0:
        yield Phase("testing", "engines", schedule=_frequency_text(trainer.test_freq, "the last"))
    if not config.async_training.is_synchronous:
        yield Phase("admit", "driver")
    if trainer.rollout_data_dir is not None:
        yield Phase("dump_rollout_generations", "driver")
    if trainer.token_records.enable:
        yield Phase(
            "token_records",
            "driver",
            schedule=_frequency_text(trainer.token_records.freq, "steps 1 and 2, after alerts"),
        )
    if trainer.save_freq > 0:
        yield Phase(
            "save_checkpoint",
            "actor and driver" if sizes.critic is None else "actor, critic and driver",
            schedule=_frequency_text(trainer.save_freq, "the last"),
        )


def _frequency_text(frequency: int, exceptions: str) -> str:
    """A frequency in steps and the ``exceptions`` from it, in words; only the exceptions if it is 0."""
    return f"every {frequency} steps, and {exceptions}" if frequency > 0 else exceptions
