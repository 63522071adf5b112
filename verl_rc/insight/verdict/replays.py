"""The findings of replays of recorded tokens, and their place among the causes that metrics name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl_rc.algorithm.health import cause_table as table
from verl_rc.algorithm.health.causes import cause_statement
from verl_rc.algorithm.health.statement import Statement
from verl_rc.insight.run_folder import ReplayedRecord
from verl_rc.metrics.bounds import BOUNDS


def merged(earlier: Sequence[ReplayedRecord], later: Sequence[ReplayedRecord]) -> list[ReplayedRecord]:
    """The records of both, steps ascending. Of one step the later record stays, with the versions of both
    where they are of the same tokens."""
    records = {record.step: record for record in earlier}
    for record in later:
        previous = records.get(record.step)
        if previous is not None and previous.tokens == record.tokens:
            record = replace(record, versions={**previous.versions, **record.versions})
        records[record.step] = record
    return [records[step] for step in sorted(records)]


def with_replays(from_metrics: Sequence[Statement], records: Sequence[ReplayedRecord]) -> list[Statement]:
    """The causes that metrics name and those that replays name, the first cause first.

    A trainer that scores other inputs comes first, because every signature is computed from its log-probs.
    Then come causes that the tokens of single steps name: they explain what replays see, and a difference of
    engines. Statements that name no fault stay only where there is none.
    """
    inputs = [statement] if (statement := _other_inputs(records)) else []
    weights = [statement] if (statement := _older_weights(records)) else []
    tokens = [
        statement
        for statement in from_metrics
        if statement.level == "fault" and table.CAUSES[statement.cause].evidence == "tokens"
    ]
    faults = [*inputs, *(tokens or weights)]
    if not faults:
        return list(from_metrics)
    specific = (
        statement
        for statement in from_metrics
        if statement.level == "fault" and table.CAUSES[statement.cause].is_specific
    )
    return [*faults, *(statement for statement in specific if statement not in tokens)]


def _confidence(records: Sequence[ReplayedRecord]) -> dict[str, Any]:
    """The fields ``confidence`` and ``steps`` of a statement that these records confirm: ``named`` by two
    records, ``likely`` by one."""
    steps = [record.step for record in records]
    return {"confidence": "named" if len(records) > 1 else "likely", "steps": (min(steps), max(steps))}


def _other_inputs(records: Sequence[ReplayedRecord]) -> Statement | None:
    """The trainer's recorded log-probs cannot be reproduced."""
    examples = [
        record
        for record in records
        if record.share > BOUNDS.part_share and record.trainer > max(BOUNDS.reproduced, record.noise)
    ]
    if not examples:
        return None
    worst = max(examples, key=lambda record: record.trainer)
    evidence = {
        "size": worst.trainer,
        "share": worst.share,
        "gap": worst.gap,
        "nondeterminism": worst.trainer_twice,
    }
    sentence = (
        "The recorded tokens with the trainer's weights of their step do not give the trainer's recorded "
        "log-probs: {size:.4f} nats between them, {share:.0%} of the gap"
    )
    if worst.trainer_twice > 0:
        sentence += ". The trainer does not give the same numbers twice ({nondeterminism:.2g})"
    return cause_statement(table.OTHER_INPUTS, evidence, sentence=sentence, **_confidence(examples))


def _older_weights(records: Sequence[ReplayedRecord]) -> Statement | None:
    """Older weights than the reported ones explain the engine's log-probs at least twice as well."""
    examples = [
        record
        for record in records
        if record.version in record.versions
        and record.best_version < record.version
        and record.versions[record.version] > BOUNDS.above_floor * record.versions[record.best_version]
    ]
    if not examples:
        return None
    worst = max(examples, key=lambda record: record.versions[record.version])
    return cause_statement(
        table.OLDER_WEIGHTS,
        {
            "step": worst.step,
            "reported_version": worst.version,
            "nearest_version": worst.best_version,
            "gap": worst.versions[worst.version],
            "distance": worst.versions[worst.best_version],
        },
        **_confidence(examples),
    )
