"""Judging a step by the gap of trainer and engine, the mismatch, its causes, and healthy ranges."""

from dataclasses import replace

from verl_rc.algorithm.health import causes, ranges
from verl_rc.algorithm.health.findings import Findings
from verl_rc.algorithm.health.ranges import HealthHistory
from verl_rc.algorithm.ppo.control import Control
from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionStatistics, require_finite
from verl_rc.metrics.log_ratio_bins import HISTOGRAM_EDGES
from verl_rc.metrics.sinks import AlertCause, Tracker
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.weight_sync.proof import LogProbGap
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import StepRecord


def judge(
    services: Services,
    state: RunState,
    measured: Measured | None,
    control: Control,
    record: StepRecord,
) -> Findings:
    """Record what rollout correction measured in the step, and judge it; nothing where it measured nothing.

    Raises ``SyncProofError`` when an engine cannot have held the trainer's weights, and
    ``NonFiniteLogProbError`` when too many log-probs are not finite.
    """
    if measured is None:
        return Findings(state.rollout_gap_limit, state.health)
    statistics, gap = measured.statistics, LogProbGap.from_statistics(measured.before_update)
    if measured.signatures is not None:
        record.add(measured.signatures.signatures())
    record_correction(services.config.algorithm.rollout_correction, statistics, control, record)
    step = state.step + 1
    if gap is not None:
        record.add({"sync/rollout_gap_mean": gap.mean, "sync/rollout_gap_max": gap.maximum})
    judged = _judge_causes(services, state.health, record, step)
    health = replace(state.health, causes=judged.history)
    findings = Findings(state.rollout_gap_limit, health, statistics.k3_kl, has_cause=judged.has_cause)
    if gap is None:
        return findings
    findings = replace(findings, mean_gap=gap.mean)
    # In a run that samples ahead, tokens are older than the trainer's weights and prove nothing: canary
    # tokens alone are judged.
    if not services.config.async_training.is_synchronous:
        return findings
    limit = services.gap_limit.limit(state.rollout_gap_limit)
    record.add({"sync/gap_limit": limit})
    calibrated = services.gap_limit.calibrate(gap, state.rollout_gap_limit, "this step's rollouts")
    return replace(findings, gap_limit=limit, next_gap_limit=calibrated)


def record_correction(
    config: RolloutCorrectionConfig, statistics: CorrectionStatistics, control: Control, record: StepRecord
) -> None:
    """Record ``rollout_corr/*`` of the step, and its histogram.

    Raises ``NonFiniteLogProbError`` when too many log-probs are not finite.
    """
    require_finite(statistics.nonfinite_fraction, config)
    record.add(statistics.metrics(control.correction(config)))
    if config.diagnostics == "full":
        record.histograms["rollout_corr/log_ratio"] = HISTOGRAM_EDGES, statistics.numbers().histograms[0]
    if control.rejection_threshold is not None:
        record.add({"rollout_corr/rollout_rs_adaptive_threshold": control.rejection_threshold})


def _judge_causes(
    services: Services, history: HealthHistory, record: StepRecord, step: int
) -> causes.CauseJudgement:
    """Alert about the cause of the gap that the step's signatures name, and about its end."""
    rollout = services.config.actor_rollout_ref.rollout
    judged = causes.judge_causes(record.values, step, history.causes, rollout.temperature, rollout.has_filter)
    record.add(judged.metrics)
    for name, message in judged.messages.items():
        alert = AlertCause(name, message.since_step, message.evidence)
        services.tracker.alert(f"gap: {name}", message.text, step, alert)
    return judged


def judge_health(tracker: Tracker, history: HealthHistory, record: StepRecord, step: int) -> HealthHistory:
    """Warn about metrics of the step outside their healthy range; returns the history with this step.

    Signatures are left out: the table of causes says in words what they mean.
    """
    warnings, history = ranges.judge_health(record.metrics(), step, history)
    warnings = [
        warning
        for warning in warnings
        if warning.name.removeprefix(ranges.WATCHED_PREFIX) not in causes.SIGNATURE_METRICS
    ]
    if warnings:
        tracker.alert(ranges.ALERT_TITLE, "\n".join(map(str, warnings)), step)
    return history
