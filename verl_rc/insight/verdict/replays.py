"""What controlled replays of recorded tokens say: parts of the gap that add up, and the cause that a part
names.

Of a recorded token: log-prob of the trainer as recorded, of the trainer's weights of that step by clean code,
of the weights that the engine held, of engines that are given the tokens (in float32 row by row, as the run's
by prefill, as the run's token by token), of the engine as recorded. Differences of neighbours are the parts;
the share of a part is its covariance with the gap over the gap's variance, and shares add to 1.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl_rc.data.token_record import Array
from verl_rc.health import cause_table as table
from verl_rc.health.causes import cause_statement
from verl_rc.health.statement import Statement, literal
from verl_rc.insight.run_folder import Part, ReplayedRecord
from verl_rc.metrics.bounds import BOUNDS

_ROLLOUT = "actor_rollout_ref.rollout"


def parts_of(chain: Sequence[tuple[str, Array]], rollout: Array) -> dict[str, Part]:
    """The gap as a sum: each of ``chain`` less the one behind it, the last less ``rollout``.

    Log-probs ``[tokens]`` by the name of the part that begins with them, from the trainer to the engine.
    """
    columns = [values.astype("float64") for _, values in chain] + [rollout.astype("float64")]
    differences = zip(chain, columns, columns[1:], strict=False)
    return {
        name: _part(values - behind, columns[0] - columns[-1]) for (name, _), values, behind in differences
    }


def _part(values: Array, gap: Array) -> Part:
    if not len(gap) or not gap.var():
        return Part(rms(values), 0.0)
    covariance = float(np.mean((values - values.mean()) * (gap - gap.mean())))
    return Part(rms(values), covariance / float(gap.var()))


def rms(values: Array) -> float:
    """Root mean square; 0 of no values."""
    return float(np.sqrt(np.mean(np.square(values, dtype="float64")))) if len(values) else 0.0


def merged(earlier: Sequence[ReplayedRecord], later: Sequence[ReplayedRecord]) -> list[ReplayedRecord]:
    """The records of both, steps ascending. Two records of one step and the same tokens become one, with the
    finer parts and the later numbers."""
    records = {record.step: record for record in earlier}
    for record in later:
        previous = records.get(record.step)
        if previous is not None and previous.tokens == record.tokens:
            mistakes = record if "alone" in record.numbers else previous  # where R1 was made last
            operation = (record if "operation_gap" in record.numbers else previous).operation  # R8
            record = replace(
                record,
                parts=max(record.parts, previous.parts, key=len),
                versions={**previous.versions, **record.versions},
                numbers={**previous.numbers, **record.numbers},
                reproduced_by=mistakes.reproduced_by,
                engine_reproduced_by=mistakes.engine_reproduced_by,
                operation=operation,
            )
        records[record.step] = record
    return [records[step] for step in sorted(records)]


def judge_replays(records: Sequence[ReplayedRecord]) -> list[Statement]:
    """The causes that replays name, the trainer's first: ``named`` by two records, ``likely`` by one.

    A stale cache and other inputs of the engine look like older weights and like another engine, too: where
    one of the former is named, the latter are not judged.
    """
    input_fault = _stale_cache(records) or _engines_inputs(records)
    further = (
        (input_fault,)
        if input_fault is not None
        else (
            _older_weights(records),
            _other_engine(records),
        )
    )
    statements = (_other_inputs(records), *further, _other_operation(records), _other_code(records))
    return [statement for statement in statements if statement is not None]


def _confidence(records: Sequence[ReplayedRecord]) -> dict[str, Any]:
    """The fields ``confidence`` and ``steps`` of a statement that these records confirm."""
    steps = [record.step for record in records]
    return {"confidence": "named" if len(records) > 1 else "likely", "steps": (min(steps), max(steps))}


def _other_inputs(records: Sequence[ReplayedRecord]) -> Statement | None:
    """The trainer's recorded log-probs cannot be reproduced."""
    examples = [
        record
        for record in records
        if (part := record.parts.get("trainer")) is not None
        and part.share > BOUNDS.part_share
        and part.size > max(BOUNDS.reproduced, record.numbers.get("noise", 0.0))
    ]
    if not examples:
        return None
    worst = max(examples, key=lambda record: record.parts["trainer"].size)
    evidence = {
        "size": worst.parts["trainer"].size,
        "share": worst.parts["trainer"].share,
        "gap": worst.gap,
        "nondeterminism": worst.numbers.get("trainer_twice", 0.0),
    }
    ways = {record.reproduced_by for record in examples} - {""}
    sentence = (
        "The recorded tokens with the trainer's weights of their step do not give the trainer's recorded "
        "log-probs: {size:.4f} nats between them, {share:.0%} of the gap"
    )
    if ways:
        sentence += f". They come out with {', '.join(sorted(ways))}"
    elif evidence["nondeterminism"] > 0:
        sentence += ". The trainer does not give the same numbers twice ({nondeterminism:.2g})"
    return cause_statement(table.OTHER_INPUTS, evidence, sentence=sentence, **_confidence(examples))


def _stale_cache(records: Sequence[ReplayedRecord]) -> Statement | None:
    """A prefix cache that older weights filled explains the engine's log-probs twice as well as weights
    alone."""
    examples = [
        record
        for record in records
        if (residual := record.parts.get("rest")) is not None
        and "stale_cache" in record.numbers
        and residual.share > BOUNDS.part_share
        and residual.size > BOUNDS.reproduced
        and min(record.numbers["own_cache"], *record.versions.values())
        > BOUNDS.above_floor * record.numbers["stale_cache"]
    ]
    if not examples:
        return None
    worst = max(examples, key=lambda record: record.numbers["own_cache"])
    return cause_statement(
        table.STALE_CACHE,
        {
            "step": worst.step,
            "reported_version": worst.version,
            "cache_version": worst.numbers["stale_version"],
            "distance": worst.numbers["stale_cache"],
            "own_cache_distance": worst.numbers["own_cache"],
            "cached_tokens": worst.numbers["cached_tokens"],
        },
        **_confidence(examples),
    )


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


def _engines_inputs(records: Sequence[ReplayedRecord]) -> Statement | None:
    """The engine's log-probs come out with a mistake in its inputs."""
    examples = [
        record for record in records if record.engine_reproduced_by and "engine_reproduced" in record.numbers
    ]
    if not examples:
        return None
    worst = max(examples, key=lambda record: record.versions[record.version])
    ways = ", ".join(sorted({record.engine_reproduced_by for record in examples}))
    return cause_statement(
        table.ENGINES_INPUTS,
        {
            "step": worst.step,
            "distance": worst.numbers["engine_reproduced"],
            "gap": worst.versions[worst.version],
        },
        sentence=f"The engine's log-probs come out with {ways}: those of step {{step:.0f}} are "
        "{distance:.4f} nats from the trainer's then, {gap:.4f} with the recorded ids",
        **_confidence(examples),
    )


def _other_engine(records: Sequence[ReplayedRecord]) -> Statement | None:
    """The run's engine differs from a replayed one, which has the recorded ids and the right weights.

    It differs when its distance is larger than at the start, or larger than rounding explains from the start.
    """
    comparable = sorted(
        (record for record in records if {"rest", "engine"} <= record.parts.keys()),
        key=lambda record: record.step,
    )
    examples = []
    firsts: dict[frozenset[str], float] = {}
    for record in comparable:
        residual = record.parts["rest"]
        # The residual is what no other part explains, so it depends on which parts were replayed.
        first = firsts.setdefault(frozenset(record.parts), residual.size)
        bound = min(BOUNDS.above_floor * first, BOUNDS.far_above_floor * _rounding_of(record))
        if residual.share > BOUNDS.part_share and residual.size > max(bound, BOUNDS.reproduced):
            examples.append(record)
    if not examples:
        return None
    worst = max(examples, key=lambda record: record.parts["rest"].size)
    return cause_statement(
        table.OTHER_ENGINE,
        {
            "size": worst.parts["rest"].size,
            "share": worst.parts["rest"].share,
            "step": worst.step,
            "first": firsts[frozenset(worst.parts)],
            "rounding": _rounding_of(worst),
        },
        **_confidence(examples),
    )


def _rounding_of(record: ReplayedRecord) -> float:
    """Nats between the trainer's code and an engine that is given the tokens, with the same weights."""
    return max(record.parts[name].size for name in ("engine", "precision") if name in record.parts)


def _other_operation(records: Sequence[ReplayedRecord]) -> Statement | None:
    """An operation of the engine is farther from the trainer's than its precision rounds."""
    for record in records:
        if record.operation:
            gap, rounding = (record.numbers[f"operation_{name}"] for name in ("gap", "rounding"))
            evidence = {"step": record.step, "gap": gap, "rounding": rounding}
            sentence = table.OTHER_OPERATION.sentence.replace("OPERATION", literal(record.operation))
            return cause_statement(table.OTHER_OPERATION, evidence, sentence, **_confidence([record]))
    return None


def _other_code(records: Sequence[ReplayedRecord]) -> Statement | None:
    """With the same weights, in float32 and row by row, the engine gives other log-probs than the trainer."""
    examples = [
        record
        for record in records
        if (part := record.parts.get("engine")) is not None
        and "precision" in record.parts  # else precision is included in the engine's part
        and part.share > BOUNDS.part_share
        and record.numbers.get("kernels", 0.0) > BOUNDS.reproduced
    ]
    if not examples:
        return None
    worst = max(examples, key=lambda record: record.numbers["kernels"])
    return cause_statement(
        table.OTHER_CODE,
        {"kernels": worst.numbers["kernels"], "share": worst.parts["engine"].share, "step": worst.step},
        **_confidence(examples),
    )
