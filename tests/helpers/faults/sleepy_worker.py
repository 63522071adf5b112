"""A trainer rank that falls asleep in the middle of an update; for ``disturbed_run.py`` with
``ACTOR_WORKER``."""

import time
from collections.abc import Sequence

from verl_rc.algorithm.ppo.in_actor import MiniBatchCorrection
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.records.batches import TrainBatch
from verl_rc.records.ragged import Ragged
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.policy_worker import PolicyWorker
from verl_rc.runtime.workers.updates import ActorReport, UpdateRequest


class SleepyPolicyWorker(PolicyWorker):
    """The second rank sleeps in its second update, when the others compute gradients."""

    updates = 0

    def update(
        self, batch: Ragged[TrainBatch], mini_batches: Sequence[MiniBatch], request: UpdateRequest
    ) -> ActorReport:
        self.updates += 1
        return super().update(batch, mini_batches, request)

    def accumulate(
        self,
        batch: Ragged[TrainBatch],
        share: MiniBatch,
        totals: ObjectiveTotals,
        correction: MiniBatchCorrection,
    ) -> None:
        if self._address.rank == 1 and self.updates == 2:
            time.sleep(3600)
        super().accumulate(batch, share, totals, correction)
