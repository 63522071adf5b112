"""Invariants of token records: broken where it is planted, silent in healthy records."""

from typing import Any

import pytest
from planted_tokens import (
    FIRST_ID,
    PLANS,
    STOP,
    VOCABULARY,
    Planted,
    Row,
    rows_of,
    shifted,
)

from verl_rc.insight.run_folder.invariants import Broken, broken_invariants
from verl_rc.records.token_records.token_record import TOKEN_CLASSES, TokenRecord
from verl_rc.records.token_records.token_rows import record_of_rows

FACTS = {"stop_token_ids": [STOP + FIRST_ID], "vocab_size": FIRST_ID + VOCABULARY}


def counts(broken: Broken) -> tuple[int, int]:
    return len(broken.rows), broken.checked


def record_of(
    plan: str | Planted, seed: int = 1, facts: dict[str, Any] = FACTS, **changed: Any
) -> TokenRecord:
    rows = rows_of(PLANS[plan] if isinstance(plan, str) else plan, seed, 1)
    return record_of_rows(facts, 1, [{**row, **changed} for row in rows])


@pytest.mark.parametrize("plan", ["healthy bf16", "healthy fp32", "temperature 0.9", "top-p 0.9", "age 4"])
def test_without_lost_or_shifted_tokens_nothing_is_broken(plan: str) -> None:
    for seed in (1, 2):
        checked = broken_invariants(record_of(plan, seed))
        assert set(checked) == {"stop", "equal", "vocabulary", "shifted", "floor", "mask"}
        assert {broken.rows for broken in checked.values()} == {()}
        assert counts(checked["equal"])[1] == 144


def test_rows_that_lost_their_stop_token() -> None:
    """Of 144 rows the 48 of every third place lose it, if one ended them and it is not their only token."""
    rows = rows_of(PLANS["healthy bf16"], 1, 1)
    lost = sum(row["finished"] and len(row["response_ids"]) > 1 for row in rows[::3])
    finished = sum(row["finished"] for row in rows)
    assert 20 < lost < 48
    assert counts(broken_invariants(record_of("stop token lost"))["stop"]) == (lost, finished)
    assert "stop" not in broken_invariants(record_of("stop token lost", facts={}))


def test_a_finished_row_that_ends_with_text_of_a_tool_is_not_judged() -> None:
    row = {"response_mask": [1, 0], "rollout_log_prob": [-1.0, 0.0], "response_ids": [5, 6], "finished": True}
    assert counts(broken_invariants(record_of_rows({"stop_token_ids": 2}, 1, [row]))["stop"]) == (0, 0)


def test_a_further_stop_token_of_the_model_is_a_special_token() -> None:
    row = {"response_mask": [1], "rollout_log_prob": [-1.0], "response_ids": [5], "finished": True}
    kinds = [{**row, "token_class": [TOKEN_CLASSES.index(name)]} for name in ("special", "word")]
    checked = broken_invariants(record_of_rows({"stop_token_ids": [2]}, 1, kinds))
    assert counts(checked["stop"]) == (1, 2)


def test_an_answer_that_two_requests_got() -> None:
    assert counts(broken_invariants(record_of("a completion returned twice"))["equal"])[0] == 1


def test_a_policy_that_is_certain_may_say_the_same_twice() -> None:
    """Five tokens of probability 0.9 are equal by chance, fifty of 0.5 are not."""
    for log_prob, length, repeated in ((-0.1, 5, 0), (-0.7, 50, 3)):
        row = {
            "response_mask": [1] * length,
            "rollout_log_prob": [log_prob] * length,
            "old_log_prob": [log_prob] * length,
            "response_ids": list(range(length)),
        }
        assert counts(broken_invariants(record_of_rows({}, 1, [row] * 4))["equal"]) == (repeated, 4)
        # One row that two ranks wrote is one row; raw log-probs may be of a higher temperature.
        assert counts(broken_invariants(record_of_rows({}, 1, [{**row, "row": 3}] * 4))["equal"])[0] == 0
        engine_alone = {name: value for name, value in row.items() if name != "old_log_prob"}
        raw = record_of_rows({"logprobs_mode": "raw_logprobs"}, 1, [engine_alone] * 4)
        assert "equal" not in broken_invariants(raw)


@pytest.mark.parametrize(("token", "size", "count"), [(-1, None, 1), (40, 40, 1), (40, 41, 0), (40, None, 0)])
def test_ids_outside_the_vocabulary(token: int, size: int | None, count: int) -> None:
    row = {"response_mask": [1], "rollout_log_prob": [-1.0]}
    rows = [{**row, "response_ids": [token]}, {**row, "response_ids": [0]}]
    facts = {} if size is None else {"vocab_size": size}
    assert counts(broken_invariants(record_of_rows(facts, 1, rows))["vocabulary"]) == (count, 2)


def test_rows_whose_log_probs_are_shifted() -> None:
    """The first 48 rows are; those with fewer than eight pairs of tokens, or alike tokens, are not judged."""
    some = Planted(changed=lambda rows, chance: shifted(rows, chance, share=1 / 3))
    record = record_of(some)
    count, rows = counts(broken_invariants(record)["shifted"])
    assert 25 < rows <= int((record.lengths >= 9).sum())
    assert max(broken_invariants(record)["shifted"].rows) < 48  # named by row
    assert 8 < count < 48 / 144 * rows + 5
    assert counts(broken_invariants(record_of("healthy fp8"))["shifted"])[0] == 0
    # One unlikely token of twelve stands beside its place: that may be chance.
    certain = [-0.01] * 12
    one = {"response_mask": [1] * 12, "old_log_prob": [*certain[:5], -3.0, *certain[6:]]}
    one["rollout_log_prob"] = [*certain[:6], -3.0, *certain[7:]]
    assert counts(broken_invariants(record_of_rows({}, 1, [one]))["shifted"]) == (0, 0)
    # A first token that is far off has no neighbour before it.
    smooth = [-0.1 - 0.01 * place for place in range(12)]
    first = {"response_mask": [1] * 12, "old_log_prob": [-6.0, *smooth[1:]], "rollout_log_prob": smooth}
    assert counts(broken_invariants(record_of_rows({}, 1, [first]))["shifted"]) == (0, 1)
    few = [{**row, "response_mask": [1] * 3, "response_ids": [1, 2, 3]} for row in ({}, {})]
    logs = {"old_log_prob": [-1.0, -2.0, -4.0], "rollout_log_prob": [-4.0, -1.0, -2.0]}
    assert counts(broken_invariants(record_of_rows({}, 1, [{**row, **logs} for row in few]))["shifted"]) == (
        0,
        0,
    )


def floored(floor: float, rows: list[Row]) -> list[Row]:
    """What an engine reports that cuts log-probs."""
    return [
        {**row, "rollout_log_prob": [max(value, floor) for value in row["rollout_log_prob"]]} for row in rows
    ]


@pytest.mark.parametrize("floor", [-1.5, -3.0, -5.0])
def test_log_probs_with_a_floor(floor: float) -> None:
    rows = rows_of(PLANS["healthy bf16"], 1, 1)
    below = sum(min(row["rollout_log_prob"]) <= floor for row in rows)
    assert counts(broken_invariants(record_of_rows({}, 1, floored(floor, rows)))["floor"]) == (below, 144)


def test_what_is_no_floor() -> None:
    """A lowest log-prob of few tokens, of equal tokens in equal rows, of log-probs that were rounded."""
    rows = rows_of(PLANS["healthy bf16"], 1, 1)
    lowest = sorted(value for row in rows for value in row["rollout_log_prob"])
    coarse = [
        {**row, "rollout_log_prob": [round(value) - 0.1 for value in row["rollout_log_prob"]]} for row in rows
    ]
    unlikely = {"response_mask": [1], "rollout_log_prob": [-9.0], "old_log_prob": [-9.5]}
    for healthy in (floored(lowest[4], rows), coarse, [*rows, *[unlikely] * 40]):
        assert counts(broken_invariants(record_of_rows({}, 1, healthy))["floor"])[0] == 0


def test_a_mask_that_leaves_out_what_was_sampled() -> None:
    """Not tokens of tools, which have no log-prob, nor rows that are left out as a whole."""
    rows = rows_of(PLANS["healthy bf16"], 1, 1)
    long = sum(len(row["response_mask"]) > 1 for row in rows)
    moved = [{**row, "response_mask": [0, *row["response_mask"][:-1]]} for row in rows]
    assert counts(broken_invariants(record_of_rows({}, 1, moved))["mask"]) == (long, long)
    tool = {"response_mask": [1, 0, 0, 1], "rollout_log_prob": [-1.0, 0.0, float("nan"), -2.0]}
    whole = {"response_mask": [0] * 3, "rollout_log_prob": [-1.0] * 3}
    assert counts(broken_invariants(record_of_rows({}, 1, [tool, whole]))["mask"]) == (0, 1)
