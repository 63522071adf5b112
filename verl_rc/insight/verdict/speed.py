"""Statements of the verdict on time: the largest stage, tokens per second, idle workers."""

import math

from verl_rc.algorithm.health.statement import Statement, filled_statement, literal
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.verdict.estimates import last_mean, last_tenth

IDLE = 0.25
"""Share of a step without a computing worker above which it is a notice: far beyond the healthy range."""
_NOT_STAGES = {"step", "testing", "save_checkpoint"}


def speed_statements(run: RunData) -> list[Statement]:
    """The largest stage, tokens per second, and idle time where there is much."""
    seconds = last_mean(run, "timing_s/step")
    if seconds is None:
        return [
            filled_statement(
                "speed", "not measured", "unknown", "Speed cannot be told: no times were logged", {}
            )
        ]
    evidence = {"seconds": seconds.value}
    template = "A step takes {seconds:.3g} s"
    stages = stage_seconds(run)
    if stages and seconds.value > 0:
        largest = max(stages, key=lambda stage: stages[stage])
        evidence["share"] = min(1.0, stages[largest] / seconds.value)
        template += f", {{share:.0%}} of it {literal(largest)}"
    tokens = last_mean(run, "perf/throughput")
    if tokens is not None:
        evidence["tokens"] = tokens.value
        template += ", {tokens:,.0f} tokens per second and device"
    idle = last_mean(run, "perf/overhead_fraction")
    if idle is not None:
        evidence["idle"] = idle.value
    if idle is None or idle.value <= IDLE:
        template += "" if idle is None else ", {idle:.0%} idle"
        return [filled_statement("speed", "busy", "good", template, evidence, steps=seconds.steps)]
    return [
        filled_statement(
            "speed",
            "idle",
            "notice",
            template + "; in {idle:.0%} of it no worker computes",
            evidence,
            confidence="named" if idle.count > 1 else "likely",
            steps=seconds.steps,
            next_test="Compare timing_s with timing_busy_s by stage: the difference is waiting.",
        )
    ]


def stage_seconds(run: RunData) -> dict[str, float]:
    """Seconds of each stage, mean over the last tenth of the steps; validation and saving are apart."""
    stages = {}
    for name, series in run.matching("timing_s/"):
        stage = name.removeprefix("timing_s/")
        if stage not in _NOT_STAGES:
            part = last_tenth(run.get("timing_s/step"))
            within = series.between(part.steps[0], part.steps[-1]) if len(part) else series
            stages[stage] = math.fsum(within.values) / max(1, len(part))
    return stages
