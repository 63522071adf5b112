"""Publishing the actor's weights to the engines, and proving that they hold them."""

from collections.abc import Sequence
from dataclasses import replace

from verl_rc.cluster.engine_group import EnginesLostError
from verl_rc.data.batches import Completions, Timed
from verl_rc.driver import recovery
from verl_rc.driver.run import Run
from verl_rc.driver.step_record import StepRecord
from verl_rc.ppo.micro_batch_limits import log_prob_limit
from verl_rc.rollout.collect import build_rollout_batch, check_versions
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.weight_sync.proof import LogProbGap, check_receipts


def publish(run: Run, version: int, record: StepRecord, with_canary: bool = False) -> None:
    """Send the current weights to every engine as ``version`` and prove that they arrived; engines that are lost are replaced.

    Canary tokens are generated ``with_canary`` and for every ``sync_proof.canary_freq``-th version.
    """
    canary_freq = run.config.actor_rollout_ref.rollout.sync_proof.canary_freq
    try:
        _deliver(run, version, record, with_canary or (canary_freq > 0 and version % canary_freq == 0))
    except EnginesLostError as lost:
        _replace_and_deliver(run, version, record, record, lost)
    record.add({"sync/bytes": float(run.manifest.num_bytes), "sync/tensors": float(len(run.manifest.tensors))})


def generate(
    run: Run, requests: Sequence[GenerationRequest], options: SamplingOptions, version: int, record: StepRecord
) -> Timed[Completions]:
    """One completion per request, by engines that hold ``version`` of the weights, with tools where the run has them.

    Engines that are lost meanwhile are replaced; all get the weights again that they had, with proof.
    """

    def on_loss(lost: EnginesLostError, num_requests: int) -> None:
        record.requests_reissued += num_requests
        # The time this takes is part of the generation, so the stages of the delivery are not timed in the step's record.
        _replace_and_deliver(run, version, StepRecord(), record, lost)

    def on_engines(requests: Sequence[GenerationRequest], options: SamplingOptions) -> Timed[Completions]:
        return run.engines.generate(requests, options, on_loss)

    if run.agent_loop is None:
        return on_engines(requests, options)
    return run.agent_loop.generate(requests, options, on_engines)


def _replace_and_deliver(
    run: Run, version: int, timings: StepRecord, counts: StepRecord, lost: EnginesLostError
) -> None:
    """Until all engines live and hold ``version``, or the step's budget of replacements is used up."""
    missing: EnginesLostError | None = lost
    while missing is not None:
        try:
            recovery.replace_engines(run, missing, counts)
            _deliver(run, version, timings, with_canary=True)
            missing = None
        except EnginesLostError as error:
            missing = error


def _deliver(run: Run, version: int, record: StepRecord, with_canary: bool) -> None:
    with record.stage("update_weights"):
        run.engines.wake_up("weights")
        sent, received = run.transport.deliver(version)
        check_receipts(run.manifest, sent, received, version)
        run.engines.wake_up("kv_cache")
    if with_canary:
        with record.stage("sync_canary"):
            check_canary(run, version, record)


def check_canary(run: Run, version: int, record: StepRecord) -> None:
    """Compare log-probs of freshly generated tokens behind a cached prefix, engine by engine, with the trainer's.

    The prompts are longer than a block of the engine's cache, so an engine that kept blocks of older weights is
    found out; log-probs of *prompt* tokens would bypass that cache and prove nothing about it.
    """
    rollout = run.config.actor_rollout_ref.rollout
    requests = canary_requests(run)
    training = SamplingOptions.for_training(rollout, run.stop_token_ids)
    options = replace(training, max_tokens=rollout.sync_proof.canary_max_tokens, ignore_eos=True)
    prompts = [request.prompt_token_ids for request in requests]
    gaps = []
    for engine, completions in enumerate(run.engines.generate_on_each(requests, options)):
        rollouts = build_rollout_batch(prompts, range(len(prompts)), completions, run.tokenizer.pad_token_id)
        check_versions(rollouts, expected_version=version)
        scores = run.actor.compute_log_probs(rollouts.tokens, log_prob_limit(run.config)).result
        gap = LogProbGap.between(scores.log_probs, rollouts.rollout_log_probs, rollouts.response_mask)
        run.canary_monitor.check(gap, f"canary tokens of rollout engine {engine} at weight version {version}")
        gaps.append(gap)
    record.add(
        {"sync/canary_mean_gap": max(gap.mean for gap in gaps), "sync/canary_max_gap": max(gap.maximum for gap in gaps)}
    )


def canary_requests(run: Run) -> list[GenerationRequest]:
    """Fixed prompts that share one prefix longer than a cache block, as far as the engine's length limit allows."""
    proof = run.config.actor_rollout_ref.rollout.sync_proof
    room = run.max_model_len - min(proof.canary_max_tokens, run.config.data.max_response_length)
    length = max(1, min(run.block_size + 8, room))
    tokens = [token for row in run.validation_rows for token in row.prompt_token_ids]
    prefix = (tokens * (length // len(tokens) + 1))[: length - 1]
    last = sorted(set(tokens))
    return [
        GenerationRequest([*prefix, last[index % len(last)]], seed=index) for index in range(proof.canary_num_prompts)
    ]
