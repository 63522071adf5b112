"""The driver's handles of the models: actor, critic and frozen policies, each a group of ranks, and the
reward model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.config.task import RewardModelConfig
from verl_rc.records.batches import CriticBatch, Timed, TokenBatch, TokenScores, TrainBatch
from verl_rc.records.microbatch import MicroBatchLimit
from verl_rc.records.ragged import Ragged
from verl_rc.runtime.weight_sync.manifest import Manifest
from verl_rc.runtime.weight_sync.transfer_group import TransferAddress
from verl_rc.runtime.workers.environment import engine_environment, trainer_environment
from verl_rc.runtime.workers.host import usable_cores
from verl_rc.runtime.workers.updates import ActorReport, UpdateReport, UpdateRequest
from verl_rc.trainer.cluster.rank_group import RankGroup
from verl_rc.trainer.cluster.rank_processes import RankProcesses
from verl_rc.trainer.cluster.remote import Pending, RemoteProcess, wait_for_all

Report = TypeVar("Report", bound=UpdateReport)


def _merged(reports: Sequence[Report]) -> Report:
    """Merge reports: the metrics of all ranks, and the fields that are equal on all ranks."""
    return replace(reports[0], metrics=[metric for report in reports for metric in report.metrics])


class ActorGroup(RankGroup):
    """All ranks of the actor."""

    role = "actor"
    replays = True
    worker = "verl_rc.runtime.workers.policy_worker:PolicyWorker"

    def compute_log_probs(
        self, tokens: Ragged[TokenBatch], limit: MicroBatchLimit
    ) -> Timed[Ragged[TokenScores]]:
        """Log-probs, entropies and, where needed, sums of squared probabilities and varentropies of all rows,
        each ``[N]``, under the current weights."""
        names = ("log_probs", "entropies", "sum_pi_squared", "varentropies")
        scores = self.score("compute_log_probs", tokens.without("head"), limit)
        return scores.map(
            lambda columns: tokens.become(TokenScores, **dict(zip(names, columns, strict=False)))
        )

    def estimate_rounding(self, tokens: Ragged[TokenBatch], limit: MicroBatchLimit) -> Tensor:
        """How far rounding moves the log-probs ``[N]`` of all rows, nats."""
        return self.score_one("estimate_rounding", tokens.without("experts", "head"), limit).result

    def compute_reference_log_probs(
        self, tokens: Ragged[TokenBatch], limit: MicroBatchLimit
    ) -> Timed[Tensor]:
        """Log-probs ``[N]`` of all rows with LoRA adapters switched off."""
        return self.score_one("compute_reference_log_probs", tokens.without("experts", "head"), limit)

    def update(
        self,
        batch: Ragged[TrainBatch],
        mini_batches: Sequence[MiniBatch],
        limit: MicroBatchLimit,
        request: UpdateRequest,
    ) -> Timed[ActorReport]:
        """One optimizer step per mini-batch on all ranks. Merges all reports."""
        arguments = ((*part, request) for part in self.split(batch, mini_batches, limit))
        return self.call_update(arguments).map(_merged)

    def manifest(self, all_tensors: bool) -> Manifest:
        """The manifest of a weight update: of all tensors, or of those that training changes."""
        manifest: Manifest = wait_for_all([self._ranks[0].call("manifest", all_tensors)])[0]
        return manifest

    def join_transfer(self, address: TransferAddress) -> list[Pending]:
        """Join the weight-transfer group; answers when the engines have joined too."""
        return [self._ranks[0].call("join_transfer", address)]

    def send_weights(self, all_tensors: bool) -> list[Pending]:
        """Broadcast the current weights; the first answer is the sender's receipt."""
        return [rank.call("send_weights", all_tensors) for rank in self._ranks]

    def device_keys(self) -> list[str]:
        """The device of each rank, as engine workers name theirs."""
        return [key for key, _ in wait_for_all([rank.call("describe_buckets") for rank in self._ranks])]

    def num_buckets(self, all_tensors: bool) -> int:
        """Number of buckets of a weight update."""
        return int(wait_for_all([self._ranks[0].call("describe_buckets", all_tensors)])[0][1])

    def offer_bucket(self, index: int, offers: Sequence[bool], all_tensors: bool) -> list[Pending]:
        """Gather one bucket on all ranks and share it on those that ``offers`` selects; each answer is a
        handle."""
        return [
            rank.call("offer_bucket", index, share, all_tensors)
            for rank, share in zip(self._ranks, offers, strict=True)
        ]

    def release_bucket(self, interrupted: bool) -> list[Pending]:
        """Release the last bucket, of an update that an engine's loss may have ``interrupted``; the first
        answer is the sender's receipt."""
        return [rank.call("release_bucket", interrupted) for rank in self._ranks]


class CriticGroup(RankGroup):
    """All ranks of the critic."""

    role = "critic"
    worker = "verl_rc.runtime.workers.critic_worker:CriticWorker"

    def compute_values(self, tokens: Ragged[TokenBatch], limit: MicroBatchLimit) -> Timed[Tensor]:
        """Values ``[N]`` of all rows."""
        return self.score_one("compute_values", tokens.without("experts", "head"), limit)

    def update(
        self,
        batch: Ragged[CriticBatch],
        mini_batches: Sequence[MiniBatch],
        limit: MicroBatchLimit,
    ) -> Timed[UpdateReport]:
        """One optimizer step per mini-batch on all ranks. Merges all reports."""
        return self.call_update(self.split(batch, mini_batches, limit)).map(_merged)


class FrozenGroup(RankGroup):
    """All ranks of a policy that only scores."""

    worker = "verl_rc.runtime.workers.policy_worker:FrozenWorker"

    def __init__(self, processes: RankProcesses, role: str) -> None:
        """``role`` in ``RunConfig.frozen_policies``."""
        self.role = role
        super().__init__(processes)

    def compute_log_probs(
        self, tokens: Ragged[TokenBatch], limit: MicroBatchLimit
    ) -> Timed[Ragged[TokenScores]]:
        """Log-probs of all rows under the policy; of a teacher, also its most likely tokens where
        the loss reads them."""

        def token_scores(scores: list[Tensor]) -> Ragged[TokenScores]:
            log_probs, *top = scores  # ids come as float32, which represents those below 2^24
            columns = dict(zip(("top_ids", "top_log_probs"), top, strict=False))
            if top:
                columns["top_ids"] = columns["top_ids"].int()
            return tokens.become(TokenScores, log_probs=log_probs, **columns)

        return self.score("compute_log_probs", tokens.without("experts", "head"), limit).map(token_scores)


class ReferenceGroup(FrozenGroup):
    """All ranks of the reference policy."""

    worker = "verl_rc.runtime.workers.policy_worker:ReferenceWorker"


class RewardModel:
    """The process of the reward model.

    It reserves no logical CPU, because it computes while trainer and engines wait. Its GPUs are separate
    (``reward.reward_model.n_gpus_per_node``).
    """

    workers: ClassVar = {
        None: "verl_rc.runtime.workers.reward_model_worker:TransformersRewardModel",
        "vllm": "verl_rc.runtime.rollout.vllm.reward_model:VllmRewardModel",
    }
    """The class that the process builds, as ``module:Class``, by ``reward.reward_model.rollout.name``."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Start the process; ``build`` loads the model."""
        self._config = config
        environment = trainer_environment(usable_cores(), one_node=False)
        if config.rollout.name is not None:
            threads = max(1, usable_cores() // config.rollout.tensor_model_parallel_size)
            device = "cuda" if config.n_gpus_per_node else "cpu"
            environment = engine_environment(threads, device, one_node=False)
        self._process = RemoteProcess(
            "reward model", environment, num_cpus=0, num_gpus=config.n_gpus_per_node
        )

    def build(self) -> list[Pending]:
        """Load the model; returns at once."""
        return [self._process.build(self.workers[self._config.rollout.name], config=self._config)]

    def score(self, conversations: Sequence[Sequence[dict[str, Any]]]) -> list[float | str]:
        """The score of each conversation in order, or the reason why there is none."""
        answers: list[float | str] = wait_for_all([self._process.call("score", conversations)])[0]
        return answers
