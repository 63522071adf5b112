"""Findings about a step: the gap of trainer and engine, the mismatch, its causes, and healthy ranges."""

from dataclasses import replace

from verl_rc.algorithm.health import causes, ranges
from verl_rc.algorithm.health.findings import Findings
from verl_rc.algorithm.health.ranges import HealthHistory
from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.correction import CorrectionStatistics, require_finite
from verl_rc.metrics.log_ratio_bins import HISTOGRAM_EDGES
from verl_rc.metrics.sinks import AlertCause, Tracker
from verl_rc.runtime.weight_sync.proof import LogProbGap
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import Step


def record_and_judge(services: Services, before: Findings, measured: Measured | None, step: Step) -> Findings:
    """Record what rollout correction measured in the step, and judge it; returns the findings ``before``
    where it measured nothing.

    Raises ``SyncProofError`` when an engine cannot have held the trainer's weights, and
    ``NonFiniteLogProbError`` when too many log-probs are not finite.
    """
    if measured is None:
        return before
    record = step.record
    statistics, gap = measured.statistics, LogProbGap.from_statistics(measured.before_update)
    if measured.signatures is not None:
        record.add(measured.signatures.signatures())
    record_correction(step, statistics)
    if gap is not None:
        record.add({"sync/rollout_gap_mean": gap.mean, "sync/rollout_gap_max": gap.maximum})
    named = _alert_of_causes(services, before.health, step)
    health = replace(before.health, causes=named.history)
    findings = Findings(before.next_gap_limit, health, statistics.k3_kl, has_cause=named.has_cause)
    if gap is None:
        return findings
    findings = replace(findings, mean_gap=gap.mean)
    # In a run that samples ahead, tokens are older than the trainer's weights and prove nothing: canary
    # tokens alone are judged.
    if not services.config.async_training.is_synchronous:
        return findings
    limit = services.gap_limit.limit(before.next_gap_limit)
    record.add({"sync/gap_limit": limit})
    calibrated = services.gap_limit.calibrate(gap, before.next_gap_limit, "this step's rollouts")
    return replace(findings, gap_limit=limit, next_gap_limit=calibrated)


def record_correction(step: Step, statistics: CorrectionStatistics) -> None:
    """Record ``rollout_corr/*`` of the step, and its histogram.

    Raises ``NonFiniteLogProbError`` when too many log-probs are not finite.
    """
    config, record = step.corrector.config, step.record
    require_finite(statistics.nonfinite_fraction, config)
    record.add(statistics.metrics(config))
    if config.diagnostics == "full":
        record.histograms["rollout_corr/log_ratio"] = HISTOGRAM_EDGES, statistics.numbers().histograms[0]
    if step.control.rejection_threshold is not None:
        record.add({"rollout_corr/rollout_rs_adaptive_threshold": step.control.rejection_threshold})


def _alert_of_causes(services: Services, history: HealthHistory, step: Step) -> causes.NamedCauses:
    """Alert about the cause of the gap that the step's signatures name, and about its end."""
    rollout = services.config.actor_rollout_ref.rollout
    named = causes.name_causes(
        step.record.values, step.number, history.causes, rollout.temperature, rollout.has_filter
    )
    step.record.add(named.metrics)
    for name, message in named.messages.items():
        alert = AlertCause(name, message.since_step, message.evidence)
        services.tracker.alert(f"gap: {name}", message.text, step.number, alert)
    return named


def warn_of_ranges(tracker: Tracker, history: HealthHistory, step: Step) -> HealthHistory:
    """Warn about metrics of the step outside their healthy range; returns the history with this step.

    Signatures are left out: the table of causes says in words what they mean.
    """
    warnings, history = ranges.range_warnings(step.record.metrics(), step.number, history)
    warnings = [
        warning
        for warning in warnings
        if warning.name.removeprefix(ranges.WATCHED_PREFIX) not in causes.SIGNATURE_METRICS
    ]
    if warnings:
        tracker.alert(ranges.ALERT_TITLE, "\n".join(map(str, warnings)), step.number)
    return history
