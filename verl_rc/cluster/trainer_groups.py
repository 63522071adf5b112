"""The trainer's roles: actor, critic and reference, each a group of ranks."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from verl_rc.cluster.rank_group import RankGroup
from verl_rc.cluster.remote import Pending, wait_for_all
from verl_rc.data.batches import CriticBatch, TokenBatch, TokenScores, TrainBatch
from verl_rc.data.microbatch import MicroBatchLimit
from verl_rc.metrics import Metric
from verl_rc.ppo.mini_batches import MiniBatch
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.transfer_group import TransferAddress
from verl_rc.workers.orders import UpdateOrder, UpdateReport


class ActorGroup(RankGroup):
    """All ranks of the actor."""

    role = "actor"
    worker = "verl_rc.workers.policy_worker:PolicyWorker"

    def compute_log_probs(self, tokens: TokenBatch, limit: MicroBatchLimit) -> TokenScores:
        """Log-probs, entropys and, where needed, sums of squared probabilities ``[B, R]`` of all rows, under the current
        weights."""
        return TokenScores(*self.score("compute_log_probs", tokens, limit))

    def compute_reference_log_probs(self, tokens: TokenBatch, limit: MicroBatchLimit) -> Tensor:
        """Log-probs ``[B, R]`` of all rows with LoRA adapters switched off."""
        return self.score("compute_reference_log_probs", tokens, limit)[0]

    def update(
        self, batch: TrainBatch, mini_batches: Sequence[MiniBatch], limit: MicroBatchLimit, order: UpdateOrder
    ) -> UpdateReport:
        """One optimizer step per mini-batch on all ranks; ``order`` says everything but which rows. One report for all ranks."""
        parts = self.split(batch, mini_batches, limit)
        reports: list[UpdateReport] = self.call_update([(rows, replace(order, mini_batches=own)) for rows, own in parts])
        return replace(reports[0], metrics=[metric for report in reports for metric in report.metrics])

    def manifest(self) -> Manifest:
        """What a weight update consists of."""
        manifest: Manifest = wait_for_all([self._ranks[0].call("manifest")])[0]
        return manifest

    def join_transfer(self, address: TransferAddress) -> list[Pending]:
        """Open the way to the engines; answers when the engines have joined too."""
        return [self._ranks[0].call("join_transfer", address)]

    def send_weights(self) -> list[Pending]:
        """Broadcast the current weights; the first answer is the sender's receipt."""
        return [rank.call("send_weights") for rank in self._ranks]

    def device_keys(self) -> list[str]:
        """The device of each rank, as engine workers name theirs."""
        return [key for key, _ in wait_for_all([rank.call("describe_lending") for rank in self._ranks])]

    def num_buckets(self) -> int:
        """In how many buckets a weight update comes."""
        return int(wait_for_all([self._ranks[0].call("describe_lending")])[0][1])

    def offer_bucket(self, index: int, offers: Sequence[bool]) -> list[Pending]:
        """Gather one bucket on all ranks and lend it where ``offers`` says so; each answer is a handle."""
        return [rank.call("offer_bucket", index, share) for rank, share in zip(self._ranks, offers, strict=True)]

    def release_bucket(self) -> list[Pending]:
        """Take the last bucket back; the first answer is the sender's receipt."""
        return [rank.call("release_bucket") for rank in self._ranks]


class CriticGroup(RankGroup):
    """All ranks of the critic."""

    role = "critic"
    worker = "verl_rc.workers.critic_worker:CriticWorker"

    def compute_values(self, tokens: TokenBatch, limit: MicroBatchLimit) -> Tensor:
        """Values ``[B, R]`` of all rows."""
        return self.score("compute_values", tokens, limit)[0]

    def update(self, batch: CriticBatch, mini_batches: Sequence[MiniBatch], limit: MicroBatchLimit) -> list[Metric]:
        """One optimizer step per mini-batch on all ranks; returns the metric records of all ranks."""
        records: list[list[Metric]] = self.call_update(self.split(batch, mini_batches, limit))
        return [metric for of_rank in records for metric in of_rank]


class ReferenceGroup(RankGroup):
    """All ranks of the reference policy."""

    role = "reference"
    worker = "verl_rc.workers.reference_worker:ReferenceWorker"

    def compute_log_probs(self, tokens: TokenBatch, limit: MicroBatchLimit) -> Tensor:
        """Log-probs ``[B, R]`` of all rows under the reference policy."""
        return self.score("compute_log_probs", tokens, limit)[0]
