"""Publishing the actor's weights to the engines, replacing lost engines, and proving that they hold the
weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from verl_rc.checkpoint import RunState
from verl_rc.cluster.engine_group import EnginesLostError, OnLoss
from verl_rc.cluster.engine_work import Request
from verl_rc.cluster.remote import wait_for_all
from verl_rc.data.batches import Timed
from verl_rc.data.parts import Sample
from verl_rc.distributed.child_process import RemoteError
from verl_rc.driver.announce import say
from verl_rc.driver.services import Services
from verl_rc.driver.step_record import StepRecord
from verl_rc.metrics.trace import TRACE
from verl_rc.ppo.choices import log_prob_limit
from verl_rc.rollout.engine import Interrupted
from verl_rc.rollout.response import build_rollout_batch, check_versions
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.proof import LogProbGap, check_receipts


def replace_engines(services: Services, lost: EnginesLostError, record: StepRecord) -> None:
    """Start new engines in the places of those lost and connect them to the trainer; they have no weights
    yet.

    Raises ``RemoteError`` when more than ``rollout.max_engine_replacements`` were lost in one step or a
    rank's node is gone, and ``EnginesLostError`` when others are lost meanwhile.
    """
    limit = services.config.actor_rollout_ref.rollout.max_engine_replacements
    record.engines_replaced += len(lost.engines)
    if record.engines_replaced > limit:
        raise RemoteError(
            f"at most actor_rollout_ref.rollout.max_engine_replacements={limit} engines are replaced in one "
            f"step, but {record.engines_replaced} were lost, the last: {lost}. Look for what kills them "
            "(memory?), or raise the limit."
        ) from lost
    # with its node, a rank is lost too, and there is no place for the engine
    services.actor.processes.require_nodes()
    say("replacing %d rollout engine(s): %s", len(lost.engines), str(lost).partition("\n")[0])
    wait_for_all(services.engines.replace(lost.engines), services.config.trainer.ready_timeout_seconds)
    services.engines.sleep()
    services.transport.open()


def publish(
    services: Services,
    state: RunState,
    version: int,
    record: StepRecord,
    canary: Literal["if due", "always", "never"] = "if due",
) -> float | None:
    """Send the current weights to every engine as ``version`` and prove that they arrived; engines that are
    lost are replaced.

    ``canary``: when canary tokens are generated and waited for. Returns the limit of their gap, which the
    first ones calibrate.
    """
    with_canary = canary == "always" or (canary == "if due" and canary_is_due(services, version))
    limit = state.canary_gap_limit
    try:
        with record.stage("update_weights"):
            _deliver(services, version)
        if with_canary:
            with record.stage("sync_canary"):
                limit = judge_canary(services, limit, version, record)
    except EnginesLostError as lost:
        with record.stage("update_weights"):
            limit = _replace_and_deliver(services, state, version, record, lost)
    _add_size(services.manifest, record)
    return limit


def _add_size(manifest: Manifest, record: StepRecord) -> None:
    record.add(
        {
            "sync/bytes": float(manifest.num_bytes),
            "sync/tensors": float(len(manifest.tensors)),
        }
    )


def publish_beside(services: Services, state: RunState, version: int, record: StepRecord) -> None:
    """Send the current weights to every engine, which loads them as ``version`` when it has ended what it was
    handed before.

    ``is_settled`` tells when all have done so. Engines that are lost are replaced, and all get the weights at
    once then.
    """
    try:
        with record.stage("update_weights"):
            services.transport.stage(version)
    except EnginesLostError as lost:
        _replace_and_deliver(services, state, version, record, lost)
    _add_size(services.manifest, record)


def is_settled(services: Services, state: RunState, version: int, record: StepRecord) -> bool:
    """Whether every engine holds the weights published last, which ``publish_beside`` may have left to it;
    proves that it does.

    Engines that are lost are replaced; all get the trainer's weights as ``version`` then.
    """
    staged = services.transport.staged
    if staged is None:
        return True
    try:
        received = services.transport.loaded()
    except EnginesLostError as lost:
        _replace_and_deliver(services, state, version, record, lost)
        return True
    if received is None:
        return False
    check_receipts(services.manifest, staged.sent, received, staged.version)
    services.transport.staged = None
    if TRACE.is_writing:
        services.engines.trace_activity()
    return True


def canary_is_due(services: Services, version: int) -> bool:
    """Whether canary tokens prove the publication of ``version``: every ``sync_proof.canary_freq``-th one."""
    frequency = services.config.actor_rollout_ref.rollout.sync_proof.canary_freq
    publication = -(-version // services.config.async_training.trigger_parameter_sync_step)
    return frequency > 0 and publication % frequency == 0


def generate(
    services: Services,
    state: RunState,
    requests: Sequence[GenerationRequest],
    options: SamplingOptions,
    version: int,
    record: StepRecord,
) -> Timed[list[Sample]]:
    """One sample per request, in order, by engines that hold ``version`` of the weights, with tools where the
    run has them.

    Engines that are lost meanwhile are replaced; all get the weights again that they had, with proof.
    """
    return services.engines.generate(requests, options, _replacing(services, state, version, record))


def collect(
    services: Services, state: RunState, wait_seconds: float, version: int, record: StepRecord
) -> list[Request]:
    """The submitted requests that have ended; every busy engine is waited for ``wait_seconds``, or until a
    quarter of what it has ended.

    Engines that are lost meanwhile are replaced; all get the trainer's weights then, as ``version``, and the
    new ones what the old ones owed.
    """
    return services.engines.collect(wait_seconds, _replacing(services, state, version, record))


def wait_for(
    services: Services, state: RunState, requests: Sequence[Request], version: int, record: StepRecord
) -> None:
    """Wait until these submitted requests have ended; lost engines are dealt with as in ``collect``."""
    services.engines.wait_for(requests, _replacing(services, state, version, record))


def collect_parts(services: Services, state: RunState, version: int, record: StepRecord) -> list[Request]:
    """Return the running requests that have ended after an update; the group of engines knows
    how far the others are. Reports what the update cost. Lost engines are dealt with as in ``collect``."""
    ended, interrupted = services.engines.collect_parts(_replacing(services, state, version, record))
    record.add(pause_metrics(list(interrupted.values())))
    return ended


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


def _replacing(services: Services, state: RunState, version: int, record: StepRecord) -> OnLoss:
    def on_loss(lost: EnginesLostError, num_requests: int) -> None:
        record.requests_reissued += num_requests
        _replace_and_deliver(services, state, version, record, lost)

    return on_loss


def _replace_and_deliver(
    services: Services, state: RunState, version: int, record: StepRecord, lost: EnginesLostError
) -> float | None:
    """Replace engines and deliver ``version`` until all engines hold it or the step's budget is used up.

    Returns the limit of the canary tokens' gap.
    """
    limit = state.canary_gap_limit
    remaining: EnginesLostError | None = lost
    while remaining is not None:
        try:
            replace_engines(services, remaining, record)
            _deliver(services, version)
            limit = judge_canary(services, state.canary_gap_limit, version, record)
            remaining = None
        except EnginesLostError as error:
            remaining = error
    return limit


def _deliver(services: Services, version: int) -> None:
    services.engines.wake_up("weights")
    sent, received = services.transport.deliver(version)
    check_receipts(services.manifest, sent, received, version)
    if TRACE.is_writing:
        services.engines.trace_activity()
    services.engines.wake_up("kv_cache")


def submit_canary(services: Services) -> list[list[Request]]:
    """Let canary tokens be generated beside what the engines do; returns the requests by engine."""
    return services.engines.submit_to_each(canary_requests(services), _canary_options(services))


def collect_canary(
    services: Services, state: RunState, requests: Sequence[Sequence[Request]], record: StepRecord
) -> None:
    """Judge what ``submit_canary`` began, waiting for it if need be, while the trainer holds the weights
    published with it.

    Lost engines are dealt with as in ``generate``.
    """
    version = state.step
    with record.stage("sync_canary"):
        on_loss = _replacing(services, state, version, record)
        answers = [services.engines.finish(of_engine, on_loss).result for of_engine in requests]
        _judge_answers(services, answers, state.canary_gap_limit, version, record)


def judge_canary(services: Services, limit: float | None, version: int, record: StepRecord) -> float | None:
    """Let every engine generate canary tokens, and judge them; returns the limit of their gap."""
    answers = services.engines.generate_on_each(canary_requests(services), _canary_options(services))
    return _judge_answers(services, answers, limit, version, record)


def _judge_answers(
    services: Services,
    answers: Sequence[Sequence[Sample]],
    limit: float | None,
    version: int,
    record: StepRecord,
) -> float | None:
    """Compare log-probs of freshly generated tokens behind a cached prefix, engine by engine, with the
    trainer's.

    The prompts are longer than a block of the engine's cache, so an engine that kept blocks of older weights
    is found out; log-probs of *prompt* tokens would bypass that cache and prove nothing about it. Returns
    ``limit``, the calibrated one, or that which the first gap calibrates.
    """
    prompts = [request.prompt_token_ids for request in canary_requests(services)]
    gaps = []
    calibrated = limit
    for engine, samples in enumerate(answers):
        rollouts = build_rollout_batch(prompts, range(len(prompts)), samples, services.tokenizer.pad_token_id)
        check_versions(rollouts, expected_version=version)
        scores = services.actor.compute_log_probs(
            rollouts.tokens, log_prob_limit(services.config.actor_rollout_ref.rollout)
        ).result
        gap = LogProbGap.between(scores.log_probs, rollouts.rollout_log_probs, rollouts.response_mask)
        where = f"canary tokens of rollout engine {engine} at weight version {version}"
        # The largest of the first gaps sets the limit of all engines.
        limit = max(limit or 0.0, services.gap_limit.calibrate(gap, calibrated, where))
        gaps.append(gap)
    largest = max(gap.mean for gap in gaps)
    record.add({"sync/canary_mean_gap": largest, "sync/canary_max_gap": max(gap.maximum for gap in gaps)})
    services.guards.act_on_canary_gap(largest, services.gap_limit.limit(limit), record, version)
    return limit


def _canary_options(services: Services) -> SamplingOptions:
    rollout = services.config.actor_rollout_ref.rollout
    training = SamplingOptions.for_training(rollout, services.stop_token_ids)
    most = min(rollout.sync_proof.canary_max_tokens, services.config.data.max_response_length)
    return replace(training, max_tokens=most, ignore_eos=True)


def canary_requests(services: Services) -> list[GenerationRequest]:
    """Fixed prompts that share one prefix longer than a cache block, as far as the engine's length limit
    allows."""
    proof = services.config.actor_rollout_ref.rollout.sync_proof
    room = services.max_model_len - min(proof.canary_max_tokens, services.config.data.max_response_length)
    length = max(1, min(services.block_size + 8, room))
    tokens = [token for row in services.validation_rows for token in row.prompt_token_ids]
    prefix = (tokens * (length // len(tokens) + 1))[: length - 1]
    last = sorted(set(tokens))
    return [
        GenerationRequest([*prefix, last[index % len(last)]], seed=index)
        for index in range(proof.canary_num_prompts)
    ]
