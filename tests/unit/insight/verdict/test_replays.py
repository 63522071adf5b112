"""Replays into words: each bound from both sides, order of causes, and files that are damaged."""

from dataclasses import replace
from typing import Any

import pytest

from verl_rc.algorithm.health.cause import Cause
from verl_rc.algorithm.health.cause_table import CAUSES, GROWN, OLDER_WEIGHTS, OTHER_INPUTS, ROUNDING
from verl_rc.algorithm.health.causes import cause_statement
from verl_rc.insight.run_folder import ReplayedRecord
from verl_rc.insight.verdict.replays import merged, with_replays

HEALTHY = ReplayedRecord(step=5, version=4, tokens=700, gap=0.03, versions={0: 0.4, 4: 0.03})


def causes(*records: ReplayedRecord) -> list[str]:
    return [one.cause for one in with_replays([], records)]


def with_trainer(size: float, share: float, **changed: Any) -> ReplayedRecord:
    return replace(HEALTHY, **{"trainer": size, "share": share, "step": 9, **changed})


def test_healthy_records_name_nothing() -> None:
    assert causes(HEALTHY, replace(HEALTHY, step=9)) == []
    assert causes() == []


@pytest.mark.parametrize(
    ("size", "share", "names"), [(0.0011, 0.16, True), (0.0009, 0.9, False), (0.5, 0.14, False)]
)
def test_a_trainer_that_is_not_reproduced(size: float, share: float, names: bool) -> None:
    assert causes(with_trainer(size, share)) == [OTHER_INPUTS.name] * names


def test_rounding_of_the_trainers_own_precision_is_no_fault() -> None:
    assert causes(with_trainer(0.02, 0.5, noise=0.021)) == []
    assert causes(with_trainer(0.02, 0.5, noise=0.019)) == [OTHER_INPUTS.name]


@pytest.mark.parametrize(("said", "names"), [(0.041, True), (0.039, False)])
def test_weights_are_older_where_others_explain_twice_as_much(said: float, names: bool) -> None:
    assert causes(replace(HEALTHY, versions={0: 0.02, 4: said})) == [OLDER_WEIGHTS.name] * names


def test_weights_that_came_later_are_never_named() -> None:
    assert causes(replace(HEALTHY, version=0, versions={0: 0.4, 4: 0.01})) == []


def test_what_other_replays_measured_of_a_step_is_kept() -> None:
    again = with_trainer(0.1, 0.5, step=HEALTHY.step, versions={4: 0.04})
    assert merged([HEALTHY], [again]) == [replace(again, versions={0: 0.4, 4: 0.04})]
    other_rows, other_step = replace(again, tokens=9), replace(HEALTHY, step=8)
    assert merged([HEALTHY, other_step], [other_rows]) == [other_rows, other_step]


def test_two_records_name_and_one_makes_likely() -> None:
    one, two = with_trainer(0.1, 0.9), with_trainer(0.2, 0.9, step=13)
    assert with_replays([], [one])[0].confidence == "likely"
    (named,) = with_replays([], [one, two])
    assert (named.confidence, named.steps, named.evidence["size"]) == ("named", (9, 13), 0.2)


def test_a_trainer_that_gives_other_numbers_each_time_is_said() -> None:
    (said,) = with_replays([], [with_trainer(0.1, 0.9, trainer_twice=0.05)])
    assert said.sentence.endswith("The trainer does not give the same numbers twice (0.05)")


TEMPERATURE, ONE_ENGINE = CAUSES["temperature"], CAUSES["one engine differs from the others"]


def test_a_trainer_with_other_inputs_comes_before_signatures_and_those_before_the_rest() -> None:
    inputs, weights = with_trainer(0.1, 0.9), replace(HEALTHY, versions={0: 0.01, 4: 0.3})

    def named(cause: Cause, *records: ReplayedRecord, **changed: Any) -> list[str]:
        return [one.cause for one in with_replays([cause_statement(cause, {}, "x", **changed)], records)]

    assert named(TEMPERATURE, inputs, weights) == [OTHER_INPUTS.name, TEMPERATURE.name]
    assert named(ROUNDING, inputs, weights) == [OTHER_INPUTS.name, OLDER_WEIGHTS.name]
    assert named(GROWN, level="notice") == [GROWN.name]
    # That one engine differs does not say why.
    assert named(ONE_ENGINE, weights) == [OLDER_WEIGHTS.name, ONE_ENGINE.name]
    assert named(ONE_ENGINE) == [ONE_ENGINE.name]
