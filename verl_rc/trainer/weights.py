"""Publishing the actor's weights to the engines, replacing lost engines, and proving that they hold the
weights."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import cycle, islice
from typing import Literal

import torch

from verl_rc.algorithm.ppo.choices import log_prob_limit
from verl_rc.metrics import Metric, Reduction
from verl_rc.metrics.trace import TRACE
from verl_rc.records.batches import TokenBatch, TokenScores
from verl_rc.records.parts import Sample
from verl_rc.records.ragged import Ragged
from verl_rc.records.rollout_batch import build_rollout_batch, check_versions
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.distributed.child_process import RemoteError
from verl_rc.runtime.exact.demand import require_exact
from verl_rc.runtime.rollout.engine import Interrupted
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.weight_sync.proof import LogProbGap, check_receipts
from verl_rc.runtime.weight_sync.sender import SendReceipt
from verl_rc.trainer.cluster.engine_group import EngineReplacer, EnginesLostError
from verl_rc.trainer.cluster.engine_work import AssignedRequest
from verl_rc.trainer.cluster.weight_transport import Receipts
from verl_rc.trainer.log import log
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import StepRecord

CANARY_TOKENS = 32
"""Tokens that are generated for a canary prompt, at most ``data.max_response_length``."""
MOST_REPLACEMENTS = 3
"""Engines that are replaced in one step at most; one more ends the run."""


class Publisher:
    """Brings the actor's weights to the engines, with proof, also to those that replace lost ones."""

    def __init__(self, services: Services, state: RunState) -> None:
        """``state`` holds the limit that canary tokens calibrated earlier."""
        self._services = services
        self.canary_gap_limit = state.canary_gap_limit
        """Limit of the mean gap of canary tokens, nats; None until the first canary calibrates it."""
        self._rollout = services.config.actor_rollout_ref.rollout
        self._rounding = math.inf
        """What rounding makes of the gap of canary tokens, where it was estimated."""

    def publish(
        self, version: int, record: StepRecord, canary: Literal["if due", "always", "never"] = "if due"
    ) -> None:
        """Send the current weights to every engine as ``version`` and prove that they arrived; replace lost
        engines.

        ``canary``: when to generate canary tokens and wait for them.
        """
        with_canary = canary == "always" or (canary == "if due" and self.canary_is_due(version))
        try:
            with record.stage("update_weights"):
                self._deliver(version, record)
            if with_canary:
                with record.stage("sync_canary"):
                    self._check_canary(version, record)
        except EnginesLostError as error:
            with record.stage("update_weights"):
                self._replace_and_deliver(version, record, error)

    def publish_staged(self, version: int, record: StepRecord) -> None:
        """Send the current weights to every engine and return; each engine ends its samples, then loads them
        as ``version``.

        ``finish_staged`` checks that all engines have loaded them. After the loss of an engine this method
        replaces it, and all engines load the weights before it returns.
        """
        with record.stage("update_weights"):
            try:
                self._services.transport.stage(version)
                self._add_size(record)
            except EnginesLostError as error:
                self._replace_and_deliver(version, record, error)

    def finish_staged(self, version: int, record: StepRecord) -> bool:
        """Check the receipts of the weights that ``publish_staged`` sent, if all engines have loaded them;
        returns whether no receipt is outstanding.

        Replaces lost engines; all engines get the trainer's weights as ``version`` then. Raises
        ``SyncProofError`` when a receipt does not fit.
        """
        transport = self._services.transport
        staged = transport.staged
        if staged is None:
            return True
        with record.stage("update_weights"):
            try:
                load_receipts = transport.loaded()
            except EnginesLostError as error:
                self._replace_and_deliver(version, record, error)
                return True
            if load_receipts is None:
                return False
            self._require_receipts(staged.send_receipt, load_receipts, staged.version)
        transport.staged = None
        return True

    def engine_replacer(self, version: int, record: StepRecord) -> EngineReplacer:
        """A function that replaces engines lost while the driver waits for samples, and sends the trainer's
        weights to all engines as ``version``, with proof."""
        return lambda error: self._replace_and_deliver(version, record, error)

    def canary_is_due(self, version: int) -> bool:
        """Whether canary tokens prove the publication of ``version``: every ``sync_proof.canary_freq``-th
        one."""
        frequency = self._rollout.sync_proof.canary_freq
        steps = self._services.config.async_training.trigger_parameter_sync_step
        return frequency > 0 and -(-version // steps) % frequency == 0

    def submit_canary(self) -> list[list[AssignedRequest]]:
        """Submit the canary prompts to every engine, beside its other samples; returns the requests by
        engine."""
        return self._services.engines.submit_to_each(self._canary_requests, self._canary_options)

    def collect_canary(
        self, requests: Sequence[Sequence[AssignedRequest]], version: int, record: StepRecord
    ) -> None:
        """Wait for the requests of ``submit_canary`` and check their samples, while the trainer holds the
        weights of ``version``, which was published then. Replaces lost engines."""
        with record.stage("sync_canary"):
            replace_lost = self.engine_replacer(version, record)
            samples = [
                self._services.engines.finish(engine_requests, replace_lost) for engine_requests in requests
            ]
            self._check_canary_samples(samples, version, record)

    def _add_size(self, record: StepRecord) -> None:
        size = self._services.transport.manifest.num_bytes
        record.add_records([Metric("sync/bytes", size, Reduction.SUM)])

    def _deliver(self, version: int, record: StepRecord) -> None:
        engines = self._services.engines
        engines.wake_up("weights")
        send_receipt, load_receipts = self._services.transport.deliver(version)
        self._require_receipts(send_receipt, load_receipts, version)
        self._add_size(record)
        engines.wake_up("kv_cache")

    def _require_receipts(self, send_receipt: SendReceipt, load_receipts: Receipts, version: int) -> None:
        check_receipts(self._services.transport.manifest, send_receipt, load_receipts, version)
        if TRACE.is_writing:
            self._services.engines.trace_activity()

    def _replace_and_deliver(self, version: int, record: StepRecord, error: EnginesLostError) -> None:
        """Replace lost engines and deliver ``version`` until all engines hold it or the step's budget of
        replacements is used up."""
        while True:
            try:
                self._replace_engines(error, record)
                self._deliver(version, record)
                self._check_canary(version, record)
                return
            except EnginesLostError as next_error:
                error = next_error

    def _replace_engines(self, error: EnginesLostError, record: StepRecord) -> None:
        """Start new engines in the places of the lost ones and connect them to the trainer; they have no
        weights yet.

        Raises ``RemoteError`` when more than ``MOST_REPLACEMENTS`` were lost in one step or a rank's node is
        gone, and ``EnginesLostError`` when new ones do not start or others are lost meanwhile.
        """
        services = self._services
        record.engines_replaced += len(error.engines)
        record.requests_reissued += services.engines.num_held(error.engines)
        if record.engines_replaced > MOST_REPLACEMENTS:
            raise RemoteError(
                f"at most {MOST_REPLACEMENTS} engines are replaced in a step, but {record.engines_replaced} "
                f"were lost, the last: {error}. Look for what kills them (memory?)."
            ) from error
        # An engine whose node has left has no place to restart in, and the node's rank is lost too.
        services.actor.processes.require_nodes()
        log("replacing %d rollout engine(s): %s", len(error.engines), str(error).partition("\n")[0])
        services.engines.replace(error.engines, services.config.trainer.ready_timeout_seconds)
        services.engines.sleep()
        services.transport.open()

    def _check_canary(self, version: int, record: StepRecord) -> None:
        """Let every engine generate canary tokens, and check them."""
        engines = self._services.engines
        samples = engines.generate_on_each(self._canary_requests, self._canary_options)
        self._check_canary_samples(samples, version, record)

    def _check_canary_samples(
        self, samples_by_engine: Sequence[Sequence[Sample]], version: int, record: StepRecord
    ) -> None:
        """Compare the log-probs of canary tokens, engine by engine, with the trainer's.

        The tokens follow a cached prefix that is longer than a block of the engine's KV cache, so an engine
        that still holds blocks of older weights is found out. Log-probs of *prompt* tokens would bypass the
        cache.
        """
        services = self._services
        prompts = [request.prompt_token_ids for request in self._canary_requests]
        samples = [sample for engine_samples in samples_by_engine for sample in engine_samples]
        rollouts = build_rollout_batch(
            prompts * len(samples_by_engine),
            range(len(samples)),
            samples,
        )
        check_versions(rollouts, expected_version=version)
        # Engines with one set of weights sample mostly the same: equal rows are scored once.
        distinct, inverse = rollouts.fingerprints.unique(return_inverse=True)
        rows = torch.empty_like(distinct).scatter_(0, inverse, torch.arange(len(inverse)))
        taken = rollouts.take(rows.tolist())
        tokens, limit = taken.tokens, log_prob_limit(self._rollout)
        if self.canary_gap_limit is None and services.gap_limit.is_estimated:
            moved = services.actor.estimate_rounding(tokens, limit)
            self._rounding = float(moved[taken.response_mask].mean())
            record.add_records([Metric("sync/canary_rounding", self._rounding, Reduction.MAX)])
        gap_limit = services.gap_limit.within(self._rounding)

        def scores_of(tokens: Ragged[TokenBatch]) -> Ragged[TokenScores]:
            return services.actor.compute_log_probs(tokens, limit).result.take(inverse.tolist())

        scores = scores_of(tokens)
        gaps = []
        nonfinite = 0
        for engine in range(len(samples_by_engine)):
            own_rows = range(engine * len(prompts), (engine + 1) * len(prompts))
            part = rollouts.take(own_rows)
            train_log_probs = scores.take(own_rows).log_probs
            source = f"canary tokens of rollout engine {engine} at weight version {version}"
            require_exact(services.config.actor_rollout_ref, train_log_probs, part, version, source)
            gap = LogProbGap.between(train_log_probs, part)
            if gap is None:
                nonfinite += int(part.response_mask.sum())
                continue
            nonfinite += gap.num_nonfinite
            gap.require_at_most(gap_limit.fault(self.canary_gap_limit), source)
            gaps.append(gap)
        record.add_records([Metric("sync/canary_nonfinite_tokens", nonfinite, Reduction.SUM)])
        if not gaps:
            return
        if self._rollout.enable_rollout_routing_replay:
            own_experts = scores_of(tokens.without("experts", "head"))
            gap = LogProbGap.between(own_experts.log_probs, rollouts)
            assert gap is not None
            record.add_records([Metric("sync/canary_own_experts_gap", gap.mean, Reduction.MAX)])
        largest = max(gaps, key=lambda gap: gap.mean)
        # The largest of the first gaps sets the limit of all engines.
        self.canary_gap_limit = gap_limit.calibrate(largest, self.canary_gap_limit, "canary tokens")
        # New engines prove themselves too: a step may have canary tokens several times.
        record.add_records([Metric("sync/canary_mean_gap", largest.mean, Reduction.MAX)])
        usual = gap_limit.limit(self.canary_gap_limit)
        services.guards.act_on_canary_gap(largest.mean, usual, record, version)

    @cached_property
    def _canary_requests(self) -> list[GenerationRequest]:
        """Fixed prompts that share one prefix longer than a block of the KV cache, as far as the engine's
        length limit allows."""
        services = self._services
        room = services.config.max_model_length - self._canary_options.max_tokens
        length = max(1, min(services.block_size + 8, room))
        rows = services.validation_rows or [services.prompts.first()]
        tokens = cycle(token for row in rows for token in row.prompt_token_ids)
        prefix = list(islice(tokens, length - 1))
        last_tokens = sorted({*prefix, next(tokens)})
        return [
            GenerationRequest([*prefix, last_tokens[index % len(last_tokens)]], seed=index)
            for index in range(self._rollout.sync_proof.canary_num_prompts)
        ]

    @property
    def _canary_options(self) -> SamplingOptions:
        max_tokens = min(CANARY_TOKENS, self._services.config.data.max_response_length)
        sampling = SamplingOptions.for_training(self._rollout, max_tokens, self._services.stop_token_ids)
        return replace(sampling, ignore_eos=True)


def pause_metrics(interrupted: Sequence[Interrupted]) -> dict[str, float]:
    """Seconds that an update held up the engines with running samples; empty when no engine had any."""
    if not interrupted:
        return {}
    pauses = [interruption.pause_seconds for interruption in interrupted]
    return {
        "async/pause_seconds/mean": sum(pauses) / len(pauses),
        "async/pause_seconds/max": max(pauses),
    }
