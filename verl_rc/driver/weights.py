"""Publishing the actor's weights to the engines, replacing lost engines, and proving that they hold the
weights."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import cycle, islice
from typing import Literal

import torch

from verl_rc.checkpoint import RunState
from verl_rc.cluster.engine_group import EngineReplacer, EnginesLostError
from verl_rc.cluster.engine_work import Request
from verl_rc.cluster.weight_transport import Receipts
from verl_rc.data.parts import Sample
from verl_rc.data.rollout_batch import build_rollout_batch, check_versions
from verl_rc.distributed.child_process import RemoteError
from verl_rc.driver.guards import require_exact
from verl_rc.driver.log import log
from verl_rc.driver.services import Services
from verl_rc.driver.step_record import StepRecord
from verl_rc.metrics import Metric, Reduction
from verl_rc.metrics.trace import TRACE
from verl_rc.ppo.choices import log_prob_limit
from verl_rc.rollout.engine import Interrupted
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.weight_sync.proof import LogProbGap, check_receipts
from verl_rc.weight_sync.sender import SendReceipt


class Publisher:
    """Brings the actor's weights to the engines, with proof, also to those that replace lost ones."""

    def __init__(self, services: Services, state: RunState) -> None:
        """``state`` has the steps done, and the limit that canary tokens have calibrated before."""
        self._services = services
        self._state = state
        self.canary_gap_limit = state.canary_gap_limit
        """Limit of the mean gap of canary tokens, nats; None until the first of them calibrate it."""
        self._rollout = services.config.actor_rollout_ref.rollout

    def publish(
        self, version: int, record: StepRecord, canary: Literal["if due", "always", "never"] = "if due"
    ) -> None:
        """Send the current weights to every engine as ``version`` and prove that they arrived; engines that
        are lost are replaced.

        ``canary``: when canary tokens are generated and waited for.
        """
        with_canary = canary == "always" or (canary == "if due" and self.canary_is_due(version))
        try:
            with record.stage("update_weights"):
                self._deliver(version, record)
            if with_canary:
                with record.stage("sync_canary"):
                    self._judge_canary(version, record)
        except EnginesLostError as lost:
            with record.stage("update_weights"):
                self._replace_and_deliver(version, record, lost)

    def publish_beside(self, version: int, record: StepRecord) -> None:
        """Send the current weights to every engine and return. An engine ends the samples it has, then loads
        the weights as ``version``.

        ``settle`` tells when all engines have loaded them. If an engine is lost, it is replaced, and all
        engines load the weights before this returns.
        """
        with record.stage("update_weights"):
            try:
                self._services.transport.stage(version)
                self._add_size(record)
            except EnginesLostError as lost:
                self._replace_and_deliver(version, record, lost)

    def settle(self, version: int, record: StepRecord) -> bool:
        """Take the receipts of weights that ``publish_beside`` has left to the engines, if all have loaded
        them, and check these; returns whether none is left to come.

        Engines that are lost are replaced; all get the trainer's weights as ``version`` then. Raises
        ``SyncProofError`` when a receipt does not fit.
        """
        transport = self._services.transport
        staged = transport.staged
        if staged is None:
            return True
        with record.stage("update_weights"):
            try:
                received = transport.loaded()
            except EnginesLostError as lost:
                self._replace_and_deliver(version, record, lost)
                return True
            if received is None:
                return False
            self._require_arrival(staged.sent, received, staged.version)
        transport.staged = None
        return True

    def engine_replacer(self, version: int, record: StepRecord) -> EngineReplacer:
        """What to do about engines that are lost while samples are waited for: new ones take their places,
        and all get the trainer's weights as ``version``, with proof."""

        return lambda lost: self._replace_and_deliver(version, record, lost)

    def canary_is_due(self, version: int) -> bool:
        """Whether canary tokens prove the publication of ``version``: every ``sync_proof.canary_freq``-th
        one."""
        frequency = self._rollout.sync_proof.canary_freq
        steps = self._services.config.async_training.trigger_parameter_sync_step
        return frequency > 0 and -(-version // steps) % frequency == 0

    def submit_canary(self) -> list[list[Request]]:
        """Let canary tokens be generated beside what the engines do; returns the requests by engine."""
        return self._services.engines.submit_to_each(self._canary_requests, self._canary_options)

    def collect_canary(self, requests: Sequence[Sequence[Request]], record: StepRecord) -> None:
        """Judge what ``submit_canary`` began, waiting for it if need be, while the trainer holds the weights
        published with it.

        Lost engines are replaced.
        """
        version = self._state.step
        with record.stage("sync_canary"):
            replace_lost = self.engine_replacer(version, record)
            answers = [self._services.engines.finish(of_engine, replace_lost) for of_engine in requests]
            self._judge_answers(answers, version, record)

    def _add_size(self, record: StepRecord) -> None:
        manifest = self._services.transport.manifest
        sizes = {"sync/bytes": manifest.num_bytes, "sync/tensors": len(manifest.tensors)}
        record.add_records(Metric(name, size, Reduction.SUM) for name, size in sizes.items())

    def _deliver(self, version: int, record: StepRecord) -> None:
        engines = self._services.engines
        engines.wake_up("weights")
        sent, received = self._services.transport.deliver(version)
        self._require_arrival(sent, received, version)
        self._add_size(record)
        engines.wake_up("kv_cache")

    def _require_arrival(self, sent: SendReceipt, received: Receipts, version: int) -> None:
        check_receipts(self._services.transport.manifest, sent, received, version)
        if TRACE.is_writing:
            self._services.engines.trace_activity()

    def _replace_and_deliver(self, version: int, record: StepRecord, lost: EnginesLostError) -> None:
        """Replace engines and deliver ``version`` until all engines hold it or the step's budget is used
        up."""
        while True:
            try:
                self._replace_engines(lost, record)
                self._deliver(version, record)
                self._judge_canary(version, record)
                return
            except EnginesLostError as error:
                lost = error

    def _replace_engines(self, lost: EnginesLostError, record: StepRecord) -> None:
        """Start new engines in the places of those lost and connect them to the trainer; they have no weights
        yet.

        Raises ``RemoteError`` when more than ``rollout.max_engine_replacements`` were lost in one step or a
        rank's node is gone, and ``EnginesLostError`` when new ones do not start or others are lost meanwhile.
        """
        services = self._services
        limit = self._rollout.max_engine_replacements
        record.engines_replaced += len(lost.engines)
        record.requests_reissued += services.engines.num_held(lost.engines)
        if record.engines_replaced > limit:
            raise RemoteError(
                f"at most actor_rollout_ref.rollout.max_engine_replacements={limit} engines are replaced in "
                f"one step, but {record.engines_replaced} were lost, the last: {lost}. Look for what kills "
                "them (memory?), or raise the limit."
            ) from lost
        # with its node, a rank is lost too, and there is no place for the engine
        services.actor.processes.require_nodes()
        log("replacing %d rollout engine(s): %s", len(lost.engines), str(lost).partition("\n")[0])
        services.engines.replace(lost.engines, services.config.trainer.ready_timeout_seconds)
        services.engines.sleep()
        services.transport.open()

    def _judge_canary(self, version: int, record: StepRecord) -> None:
        """Let every engine generate canary tokens, and judge them."""
        engines = self._services.engines
        answers = engines.generate_on_each(self._canary_requests, self._canary_options)
        self._judge_answers(answers, version, record)

    def _judge_answers(self, answers: Sequence[Sequence[Sample]], version: int, record: StepRecord) -> None:
        """Compare log-probs of freshly generated tokens behind a cached prefix, engine by engine, with the
        trainer's.

        The prompts are longer than a block of the engine's cache, so an engine that kept blocks of older
        weights is found out; log-probs of *prompt* tokens would bypass that cache and prove nothing about it.
        """
        services = self._services
        prompts = [request.prompt_token_ids for request in self._canary_requests]
        samples = [sample for of_engine in answers for sample in of_engine]
        rollouts = build_rollout_batch(
            prompts * len(answers), range(len(samples)), samples, services.tokenizer.pad_token_id
        )
        check_versions(rollouts, expected_version=version)
        # Engines with one set of weights sample mostly the same: equal rows are scored once.
        assert rollouts.fingerprints is not None
        distinct, places = rollouts.fingerprints.unique(return_inverse=True)
        rows = torch.empty_like(distinct).scatter_(0, places, torch.arange(len(places)))
        tokens, rows_at_once = rollouts.tokens[rows], log_prob_limit(self._rollout)
        scores = services.actor.compute_log_probs(tokens, rows_at_once).result
        gaps = []
        nonfinite = 0
        parts = zip(places.split(len(prompts)), rollouts.split(len(prompts)), strict=True)
        for engine, (place, mine) in enumerate(parts):
            where = f"canary tokens of rollout engine {engine} at weight version {version}"
            require_exact(services.config, scores.log_probs[place], mine, version, where)
            gap = LogProbGap.between(scores.log_probs[place], mine.rollout_log_probs, mine.response_mask)
            if gap is None:
                nonfinite += int(mine.response_mask.sum())
                continue
            nonfinite += gap.num_nonfinite
            gap.require_at_most(services.gap_limit.fault(self.canary_gap_limit), where)
            gaps.append(gap)
        record.add_records([Metric("sync/canary_nonfinite_tokens", nonfinite, Reduction.SUM)])
        if not gaps:
            return
        if tokens.experts_counts is not None:
            own = services.actor.compute_log_probs(tokens.without_experts(), rows_at_once).result.log_probs
            gap = LogProbGap.between(own[places], rollouts.rollout_log_probs, rollouts.response_mask)
            assert gap is not None
            record.add_records([Metric("sync/canary_own_experts_gap", gap.mean, Reduction.MAX)])
        largest = max(gaps, key=lambda gap: gap.mean)
        # The largest of the first gaps sets the limit of all engines.
        limit = self.canary_gap_limit = services.gap_limit.calibrate(
            largest, self.canary_gap_limit, "canary tokens"
        )
        # New engines prove themselves too: a step may have canary tokens several times.
        gaps_of_step = {"mean": largest.mean, "max": max(gap.maximum for gap in gaps)}
        record.add_records(
            Metric(f"sync/canary_{name}_gap", gap, Reduction.MAX) for name, gap in gaps_of_step.items()
        )
        services.guards.act_on_canary_gap(largest.mean, services.gap_limit.limit(limit), record, version)

    @cached_property
    def _canary_requests(self) -> list[GenerationRequest]:
        """Fixed prompts that share one prefix longer than a cache block, as far as the engine's length limit
        allows."""
        services = self._services
        room = services.config.max_model_length - self._canary_options.max_tokens
        length = max(1, min(services.block_size + 8, room))
        tokens = cycle(token for row in services.validation_rows for token in row.prompt_token_ids)
        prefix = list(islice(tokens, length - 1))
        last = sorted({*prefix, next(tokens)})
        return [
            GenerationRequest([*prefix, last[index % len(last)]], seed=index)
            for index in range(self._rollout.sync_proof.canary_num_prompts)
        ]

    @property
    def _canary_options(self) -> SamplingOptions:
        training = SamplingOptions.for_training(self._rollout, self._services.stop_token_ids)
        most = min(self._rollout.sync_proof.canary_max_tokens, self._services.config.data.max_response_length)
        return replace(training, max_tokens=most, ignore_eos=True)


def pause_metrics(interrupted: Sequence[Interrupted]) -> dict[str, float]:
    """What an update cost the engines that were at work; nothing where none was."""
    if not interrupted:
        return {}
    pauses = [interruption.pause_seconds for interruption in interrupted]
    return {
        "async/pause_seconds/mean": sum(pauses) / len(pauses),
        "async/pause_seconds/max": max(pauses),
        "async/recomputed_tokens": float(sum(interruption.recomputed_tokens for interruption in interrupted)),
    }
