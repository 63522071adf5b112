"""The causes of the gap that metrics name and those that replays name, as one list."""

from collections.abc import Sequence

from verl_rc.health.statement import Statement
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.verdict.replays import OTHER_INPUTS, judge_replays, replayed_records

_SIGNED = range(1, 13)
"""Rows of the decision table that a step's own tokens explain; replays explain what is left, as why one
engine differs (13)."""


def ranked(said: Sequence[Statement], replayed: Sequence[Statement]) -> list[Statement]:
    """The first cause first.

    A trainer that scores other inputs comes first, because every signature is computed from its log-probs.
    Then what signatures name, which explains a difference of engines, then what replays alone see; statements
    that name no fault are said only without one.
    """
    inputs = [one for one in replayed if one.cause == OTHER_INPUTS]
    signed = [one for one in said if one.level == "fault" and one.row in _SIGNED]
    others = [] if signed else [one for one in replayed if one.cause != OTHER_INPUTS]
    faults = [*inputs, *signed, *others]
    rest = [one for one in said if one not in signed]
    if faults:
        rest = [one for one in rest if one.level == "fault" and one.row not in (11, 20)]
    return [*faults, *rest]


def judge_with_replays(run: RunData, said: Sequence[Statement]) -> list[Statement]:
    """What is said of the gap of a run, with the replays that stand beside it."""
    return ranked(said, judge_replays(replayed_records(run.replays)))
