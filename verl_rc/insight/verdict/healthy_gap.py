"""A gap that is larger than rounding makes for this model in this precision, as a replay of the first batch
measures it."""

from collections.abc import Sequence

from verl_rc.health import cause_table as table
from verl_rc.health.causes import PREFIX, cause_statement
from verl_rc.health.statement import Statement
from verl_rc.insight.run_folder import ReplayedRecord, RunData, Series
from verl_rc.insight.verdict.estimates import confirm
from verl_rc.insight.verdict.gap_series import GAP
from verl_rc.metrics.bounds import BOUNDS

HEALTHY = "healthy_gap"
"""Among the numbers of a replayed record: nats between the trainer's code in its own precision and in the
engine's; left out where the engine rounds in more ways than its dtype."""


def larger_than_healthy(run: RunData, records: Sequence[ReplayedRecord]) -> list[Statement]:
    """A notice where the gap is more than twice the healthy one: in the replayed step, or in two neighbouring
    steps after it.

    In later steps both logit noise and mean |log-ratio| must have grown: a policy that grows certain raises
    only one of them.
    """
    first = next((record for record in records if HEALTHY in record.numbers and record.gap), None)
    if first is None:
        return []
    healthy = max(first.numbers[HEALTHY], BOUNDS.reproduced)
    largest, steps = first.gap, (first.step, first.step)
    if first.gap <= BOUNDS.above_floor * healthy:
        sizes = _sizes(run, first)
        larger = confirm(Series.from_steps(sizes), lambda size: size > BOUNDS.above_floor * healthy)
        if larger is None:
            return []
        begin, end = steps = larger.steps
        largest = max(size for step, size in sizes.items() if begin <= step <= end)
    evidence = {"gap": largest, "healthy": healthy, "step": first.step, "times": largest / healthy}
    return [cause_statement(table.LARGER_THAN_HEALTHY, evidence, confidence="possible", steps=steps)]


def _sizes(run: RunData, first: ReplayedRecord) -> dict[int, float]:
    """The gap of each step from the replayed one on, nats: the replayed gap times the growth since, by the
    measure that grew least."""
    noise, mean = (run.get(name).by_step() for name in (f"{PREFIX}logit_noise", GAP))
    measures = [values for values in (noise, mean) if values.get(first.step)]
    return {
        step: first.gap * min(values[step] / values[first.step] for values in measures)
        for step in (sorted(measures[0]) if measures else ())
        if step >= first.step and all(step in values for values in measures)
    }
