"""A gap that is larger than rounding makes for this model in this precision, as a replay of the first batch
measures it."""

from collections.abc import Sequence

from verl_rc.health import cause_table as table
from verl_rc.health.causes import PREFIX, cause_statement
from verl_rc.health.statement import Statement
from verl_rc.insight.run_folder import ReplayedRecord, RunData, Series
from verl_rc.insight.verdict.estimates import lasting
from verl_rc.insight.verdict.gap_series import GAP
from verl_rc.metrics.bounds import BOUNDS

HEALTHY = "healthy_gap"
"""Among the numbers of a replayed record: nats between the trainer's code in its own precision and in the
engine's; left out where the engine rounds in more ways than its dtype."""


def larger_than_healthy(run: RunData, records: Sequence[ReplayedRecord]) -> list[Statement]:
    """A look where the gap is more than twice the healthy one: in the replayed step, or in two later
    neighbours.

    Of later steps logit noise and mean |log-ratio| are compared with those of the replayed one: a policy
    that grows certain moves one of them alone.
    """
    first = next((record for record in records if HEALTHY in record.numbers and record.gap), None)
    if first is None:
        return []
    healthy = max(first.numbers[HEALTHY], BOUNDS.reproduced)
    largest, steps = first.gap, (first.step, first.step)
    if first.gap <= BOUNDS.above_floor * healthy:
        sizes = _sizes(run, first)
        _, begin, end = lasting(Series.from_steps(sizes), lambda size: size > BOUNDS.above_floor * healthy)
        if begin < 0:
            return []
        largest, steps = max(sizes[step] for step in sizes if begin <= step <= end), (begin, end)
    evidence = {"gap": largest, "healthy": healthy, "step": first.step, "times": largest / healthy}
    cause = table.LARGER_THAN_HEALTHY
    next_test = cause.next_test if run.is_own else table.NOT_THE_MODEL.next_test
    return [cause_statement(cause, evidence, confidence="possible", steps=steps, next_test=next_test)]


def _sizes(run: RunData, first: ReplayedRecord) -> dict[int, float]:
    """By step, nats: the replayed gap times the growth since, by the measure that grew least."""
    noise, mean = (run.get(name).by_step() for name in (f"{PREFIX}logit_noise", GAP))
    known = [values for values in (noise, mean) if values.get(first.step)]
    return {
        step: first.gap * min(values[step] / values[first.step] for values in known)
        for step in (sorted(known[0]) if known else ())
        if step >= first.step and all(step in values for values in known)
    }
