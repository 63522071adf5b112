"""The causes of the gap that metrics name and those that replays name, as one list."""

from collections.abc import Sequence

from verl_rc.health.cause_table import CAUSES, OTHER_INPUTS
from verl_rc.health.statement import Statement
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.verdict.replays import judge_replays, replayed_records


def ranked(from_metrics: Sequence[Statement], from_replays: Sequence[Statement]) -> list[Statement]:
    """Put the first cause first.

    A trainer that scores other inputs comes first, because every signature is computed from its log-probs.
    Then come causes that the tokens of single steps name: they explain what replays see, and a difference of
    engines. Statements that name no fault stay only where there is none.
    """
    inputs = [one for one in from_replays if one.cause == OTHER_INPUTS.name]
    tokens = [one for one in from_metrics if one.level == "fault" and CAUSES[one.cause].evidence == "tokens"]
    others = [] if tokens else [one for one in from_replays if one.cause != OTHER_INPUTS.name]
    faults = [*inputs, *tokens, *others]
    rest = [one for one in from_metrics if one not in tokens]
    if faults:
        rest = [one for one in rest if one.level == "fault" and CAUSES[one.cause].is_specific]
    return [*faults, *rest]


def judge_with_replays(run: RunData, from_metrics: Sequence[Statement]) -> list[Statement]:
    """Rank what metrics say of a run with the replays that stand beside it."""
    return ranked(from_metrics, judge_replays(replayed_records(run.replays)))
