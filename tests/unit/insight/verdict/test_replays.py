"""Replays into words: each bound from both sides, order of causes, and files that are damaged."""

from dataclasses import replace
from typing import Any

import pytest

from verl_rc.health.cause_table import (
    CAUSES,
    ENGINES_INPUTS,
    GROWN,
    OLDER_WEIGHTS,
    OTHER_CODE,
    OTHER_ENGINE,
    OTHER_INPUTS,
    OTHER_OPERATION,
    ROUNDING,
    STALE_CACHE,
)
from verl_rc.health.causes import cause_statement
from verl_rc.insight.run_folder import Part, ReplayedRecord
from verl_rc.insight.verdict.diagnosis import ranked
from verl_rc.insight.verdict.replays import judge_replays, merged

HEALTHY = ReplayedRecord(
    step=5,
    version=4,
    tokens=700,
    gap=0.03,
    parts={
        "trainer": Part(0.0, 0.0),
        "versions": Part(0.0, 0.0),
        "engine": Part(0.03, 0.98),
        "rest": Part(0.004, 0.02),
    },
    versions={0: 0.4, 4: 0.03},
    numbers={"noise": 0.0, "trainer_twice": 0.0},
)


def causes(*records: ReplayedRecord) -> list[str]:
    return [one.cause for one in judge_replays(records)]


def with_part(name: str, size: float, share: float, step: int = 9) -> ReplayedRecord:
    return replace(HEALTHY, step=step, parts={**HEALTHY.parts, name: Part(size, share)})


def test_healthy_records_name_nothing() -> None:
    assert causes(HEALTHY, replace(HEALTHY, step=9)) == []
    assert causes() == []


@pytest.mark.parametrize(
    ("size", "share", "names"), [(0.0011, 0.16, True), (0.0009, 0.9, False), (0.5, 0.14, False)]
)
def test_a_trainer_that_is_not_reproduced(size: float, share: float, names: bool) -> None:
    assert causes(with_part("trainer", size, share)) == [OTHER_INPUTS.name] * names


def test_rounding_of_the_trainers_own_precision_is_no_fault() -> None:
    record = with_part("trainer", 0.02, 0.5)
    assert causes(replace(record, numbers={"noise": 0.021})) == []
    assert causes(replace(record, numbers={"noise": 0.019})) == [OTHER_INPUTS.name]


@pytest.mark.parametrize(("said", "names"), [(0.041, True), (0.039, False)])
def test_weights_are_older_where_others_explain_twice_as_much(said: float, names: bool) -> None:
    assert causes(replace(HEALTHY, versions={0: 0.02, 4: said})) == [OLDER_WEIGHTS.name] * names


def test_weights_that_came_later_are_never_named() -> None:
    assert causes(replace(HEALTHY, version=0, versions={0: 0.4, 4: 0.01})) == []


@pytest.mark.parametrize(
    ("size", "share", "names"), [(0.0081, 0.16, True), (0.0079, 0.5, False), (0.05, 0.14, False)]
)
def test_another_engine_is_one_that_was_nearer_at_the_start(size: float, share: float, names: bool) -> None:
    assert causes(HEALTHY, with_part("rest", size, share)) == [OTHER_ENGINE.name] * names


def test_rests_beside_other_replays_are_not_compared() -> None:
    with_decode = with_part("rest", 0.0003, 0.01, step=1)
    with_decode = replace(with_decode, parts={**with_decode.parts, "decode": Part(0.01, 0.2)})
    assert causes(with_decode, with_part("rest", 0.01, 0.3)) == []
    assert causes(with_part("rest", 0.0003, 0.01, step=1), with_part("rest", 0.01, 0.3)) == [
        OTHER_ENGINE.name
    ]


@pytest.mark.parametrize(
    ("size", "share", "names"), [(0.121, 0.16, True), (0.119, 0.9, False), (0.5, 0.14, False)]
)
def test_or_one_that_is_farther_than_rounding_from_the_start_on(
    size: float, share: float, names: bool
) -> None:
    always = with_part("rest", size, share, step=1)
    assert causes(always, replace(always, step=9)) == [OTHER_ENGINE.name] * names
    split = {**always.parts, "engine": Part(1e-6, 0.0), "precision": Part(0.03, 0.1)}  # with R6
    assert causes(replace(always, parts=split)) == [OTHER_ENGINE.name] * names


def test_the_mistake_in_the_engines_inputs_is_said_in_place_of_another_engine() -> None:
    far = with_part("rest", 0.3, 0.9)
    record = replace(
        far, numbers={**far.numbers, "engine_reproduced": 0.01}, engine_reproduced_by="prompts doubled"
    )
    (said,) = judge_replays([record])
    assert said.cause == ENGINES_INPUTS.name
    assert "come out with prompts doubled: those of step 9 are 0.0100 nats" in said.sentence


@pytest.mark.parametrize(("size", "names"), [(0.0009, False), (0.0011, True)])
def test_an_engine_that_was_reproduced_exactly_at_the_start_may_round(size: float, names: bool) -> None:
    exact = with_part("rest", 0.0, 0.0, step=1)
    assert causes(exact, with_part("rest", size, 0.5)) == [OTHER_ENGINE.name] * names


def test_what_other_replays_measured_of_a_step_is_kept() -> None:
    by_trainer = replace(
        HEALTHY,
        parts={"trainer": Part(0.1, 0.5), "engine": Part(0.03, 0.5)},
        numbers={"trainer_twice": 0.1, "alone": 0.02, "noise": 0.02},
        reproduced_by="padding",
    )
    by_engine = replace(HEALTHY, numbers={"trainer_twice": 0.2, "kernels": 0.3}, versions={4: 0.04})
    (both,) = merged([by_trainer], [by_engine])
    assert both == replace(
        HEALTHY,
        numbers={"trainer_twice": 0.2, "alone": 0.02, "noise": 0.02, "kernels": 0.3},
        versions={0: 0.4, 4: 0.04},
        reproduced_by="padding",
    )
    assert merged([by_engine], [by_trainer])[0].parts == by_engine.parts  # the finer ones
    assert (
        merged([by_trainer], [replace(by_trainer, reproduced_by="")])[0].reproduced_by == ""
    )  # R1 was made again
    other_rows = replace(by_engine, tokens=9)
    assert merged([by_trainer, replace(by_trainer, step=8)], [other_rows]) == [
        other_rows,
        replace(by_trainer, step=8),
    ]


def with_caches(own: float, stale: float, share: float = 0.9, **changed: Any) -> ReplayedRecord:
    """A record whose last part is that of a cache of its own."""
    numbers = {
        **HEALTHY.numbers,
        "own_cache": own,
        "stale_cache": stale,
        "stale_version": 0.0,
        "cached_tokens": 320.0,
    }
    changed = {"versions": {0: 0.4, 4: own + 0.01}, **changed}
    return replace(with_part("rest", own, share), numbers=numbers, **changed)


@pytest.mark.parametrize(
    ("own", "stale", "share", "names"),
    [
        (0.041, 0.02, 0.16, True),
        (0.039, 0.02, 0.9, False),  # not twice as near
        (0.041, 0.02, 0.14, False),
        (0.0011, 0.0, 0.9, True),
        (0.0009, 0.0, 0.9, False),
    ],
)
def test_a_cache_of_older_weights_explains_what_is_left(
    own: float, stale: float, share: float, names: bool
) -> None:
    assert causes(with_caches(own, stale, share)) == [STALE_CACHE.name] * names


def test_a_stale_cache_is_said_alone_and_not_where_older_weights_explain_as_much() -> None:
    stale = with_caches(0.3, 0.01, versions={0: 0.1, 4: 0.31})
    assert causes(HEALTHY, stale) == [STALE_CACHE.name]
    # Engines are replayed with the weights that explain most.
    assert causes(with_caches(0.01, 0.01, versions={0: 0.01, 4: 0.31})) == [OLDER_WEIGHTS.name]


@pytest.mark.parametrize(
    ("kernels", "share", "names"), [(0.0011, 0.16, True), (0.0009, 0.9, False), (0.5, 0.14, False)]
)
def test_code_that_differs_in_float32_is_no_rounding(kernels: float, share: float, names: bool) -> None:
    record = replace(with_part("engine", 0.03, share), numbers={**HEALTHY.numbers, "kernels": kernels})
    assert causes(record) == []  # precision is in the engine's part: R6 was made by itself
    record = replace(record, parts={**record.parts, "precision": Part(0.03, 0.1)})
    assert causes(record) == [OTHER_CODE.name] * names
    assert causes(with_part("engine", 0.03, share)) == []  # R6 was not asked for


def test_two_records_name_and_one_makes_likely() -> None:
    one, two = with_part("trainer", 0.1, 0.9), with_part("trainer", 0.2, 0.9, step=13)
    assert judge_replays([one])[0].confidence == "likely"
    (named,) = judge_replays([one, two])
    assert (named.confidence, named.steps, named.evidence["size"]) == ("named", (9, 13), 0.2)


TEMPERATURE, ONE_ENGINE = CAUSES["temperature"], CAUSES["one engine differs from the others"]


def test_a_trainer_with_other_inputs_comes_before_signatures_and_those_before_the_rest() -> None:
    replayed = judge_replays([with_part("trainer", 0.1, 0.9), replace(HEALTHY, versions={0: 0.01, 4: 0.3})])
    said = [cause_statement(TEMPERATURE, {}, sentence="x"), cause_statement(ROUNDING, {}, sentence="x")]
    assert [one.cause for one in ranked(said, replayed)] == [OTHER_INPUTS.name, TEMPERATURE.name]
    assert [one.cause for one in ranked([cause_statement(ROUNDING, {}, sentence="x")], replayed)] == [
        OTHER_INPUTS.name,
        OLDER_WEIGHTS.name,
    ]
    assert [one.cause for one in ranked([cause_statement(GROWN, {}, sentence="x", level="notice")], [])] == [
        GROWN.name
    ]
    # That one engine differs does not say why.
    other_weights = judge_replays([replace(HEALTHY, versions={0: 0.01, 4: 0.3})])
    assert [one.cause for one in ranked([cause_statement(ONE_ENGINE, {}, sentence="x")], other_weights)] == [
        OLDER_WEIGHTS.name,
        ONE_ENGINE.name,
    ]
    assert [one.cause for one in ranked([cause_statement(ONE_ENGINE, {}, sentence="x")], [])] == [
        ONE_ENGINE.name
    ]


def test_an_operation_beyond_rounding_is_named_with_both_distances() -> None:
    numbers = {**HEALTHY.numbers, "operation_gap": 0.12, "operation_rounding": 0.002}
    record = replace(HEALTHY, operation="model.layers.0.{x}.rotary_emb", numbers=numbers)
    (said,) = judge_replays([HEALTHY, record])
    assert (said.cause, said.confidence) == (OTHER_OPERATION.name, "likely")
    assert said.sentence.startswith("model.layers.0.{x}.rotary_emb is the first operation of the engine")
    assert f"of step {HEALTHY.step} 0.12 of its size from float32" in said.sentence
    assert "engine's precision is 0.002" in said.sentence


def test_the_operation_that_was_found_is_kept_until_the_next_replay_of_operations() -> None:
    found = replace(
        HEALTHY, operation="model.norm", numbers={"operation_gap": 0.1, "operation_rounding": 0.0}
    )
    again = replace(HEALTHY, numbers={"operation_gap": 0.0, "operation_rounding": 0.0})
    assert [record.operation for record in merged([found], [HEALTHY])] == ["model.norm"]
    assert [record.operation for record in merged([found], [again])] == [""]
