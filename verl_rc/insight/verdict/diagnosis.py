"""The causes of the gap that metrics name and those that replays name, as one list."""

from collections.abc import Sequence

from verl_rc.health.cause_table import CAUSES, OTHER_INPUTS
from verl_rc.health.statement import Statement
from verl_rc.insight.run_folder import ReplayedRecord, RunData
from verl_rc.insight.verdict.healthy_gap import larger_than_healthy
from verl_rc.insight.verdict.replays import judge_replays


def ranked(from_metrics: Sequence[Statement], from_replays: Sequence[Statement]) -> list[Statement]:
    """Put the first cause first.

    A trainer that scores other inputs comes first, because every signature is computed from its log-probs.
    Then come causes that the tokens of single steps name: they explain what replays see, and a difference of
    engines. What is only to be looked at comes behind faults. Statements that name no fault stay only where
    there is none.
    """
    looks = [statement for statement in from_replays if statement.level == "notice"]
    from_replays = [statement for statement in from_replays if statement not in looks]
    inputs = [statement for statement in from_replays if statement.cause == OTHER_INPUTS.name]
    tokens = [
        statement
        for statement in from_metrics
        if statement.level == "fault" and CAUSES[statement.cause].evidence == "tokens"
    ]
    further = (
        [] if tokens else [statement for statement in from_replays if statement.cause != OTHER_INPUTS.name]
    )
    faults = [*inputs, *tokens, *further]
    remainder = [statement for statement in from_metrics if statement not in tokens]
    if faults:
        remainder = [
            statement
            for statement in remainder
            if statement.level == "fault" and CAUSES[statement.cause].is_specific
        ]
    if looks and not faults:
        remainder = [statement for statement in remainder if statement.level != "good"]
    is_fault = [statement.level == "fault" for statement in remainder]
    place = len(remainder) - is_fault[::-1].index(True) if any(is_fault) else 0
    return [*faults, *remainder[:place], *looks, *remainder[place:]]


def with_replays(
    run: RunData, from_metrics: Sequence[Statement], records: Sequence[ReplayedRecord]
) -> list[Statement]:
    """Rank the causes that the metrics of a run and these replays name."""
    return ranked(from_metrics, [*judge_replays(records), *larger_than_healthy(run, records)])
