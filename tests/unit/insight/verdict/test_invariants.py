"""Broken invariants come first in the verdict, of foreign records and of this project's own."""

import re
from pathlib import Path

import pytest
from planted_series import healthy, write_run
from planted_tokens import FIRST_ID, PLANS, STOP, rows_of

from verl_rc.insight.run_folder import read_run
from verl_rc.insight.verdict import verdict_of
from verl_rc.insight.verdict.signatures import signature_causes
from verl_rc.records.token_records.token_lines import TokenLines

STOP_IDS = [STOP + FIRST_ID]


def write_tokens(
    path: Path, plan: str, trainer: str = "mine", steps: tuple[int, ...] = (1, 2), **facts: object
) -> Path:
    with TokenLines(path, trainer, **facts) as lines:
        for step in steps:
            for row in rows_of(PLANS[plan], 1, step):
                lines.write(**row)
    return path


def causes(path: Path) -> list[tuple[str, str]]:
    statements = [
        statement for statement in verdict_of(read_run(path)).statements if statement.topic == "gap"
    ]
    return [(statement.cause, statement.confidence) for statement in statements if statement.level == "fault"]


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ("healthy bf16", []),
        ("stop token lost", ["finished rows without a stop token"]),
        (
            "stop token lost, log-probs shifted",
            ["finished rows without a stop token", "log-probs of some rows shifted"],
        ),
        ("a completion returned twice", ["one sample for several requests"]),
        ("log-probs shifted", ["log-probs shifted"]),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, plan: str, named: list[str]) -> None:
    path = write_tokens(tmp_path / "run.jsonl", plan, stop_token_ids=STOP_IDS)
    assert causes(path) == [(cause, "named") for cause in named]


def test_the_rows_are_named(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "run.jsonl", "stop token lost, log-probs shifted", stop_token_ids=STOP_IDS)
    texts = {one.cause: one.text for one in verdict_of(read_run(path)).statements if one.topic == "gap"}
    (rows,) = re.findall(r"in step 1 row ([\d, ]+, …)", texts["log-probs of some rows shifted"])
    assert all(int(row) % 3 == 0 for row in rows.split(", ")[:-1])  # every third row lost its stop token


def test_records_of_an_own_run_are_checked_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", healthy())
    path = folder / "tokens/step_000001.jsonl"
    write_tokens(path, "stop token lost", "verl_rc", (1,), stop_token_ids=STOP_IDS)
    assert causes(folder) == [("finished rows without a stop token", "named")]


def test_what_was_not_checked_says_what_it_needs(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "run.jsonl", "stop token lost")
    assert causes(path) == []
    needs = "needs finished, response_ids and the fact stop_token_ids"
    assert f"finished rows without a stop token (row 21): {needs}" in verdict_of(read_run(path)).unasked


def test_a_floor_is_named_and_nothing_else(tmp_path: Path) -> None:
    """The cut log-probs make a mass that is missing and a slope, which would name other causes."""
    path = tmp_path / "run.jsonl"
    with TokenLines(path, "mine") as lines:
        for step in (1, 2):
            for row in rows_of(PLANS["healthy bf16"], 1, step):
                lines.write(**row | {"rollout_log_prob": [max(x, -2.0) for x in row["rollout_log_prob"]]})
    run = read_run(path)
    assert causes(path) == [("log-probs with a floor", "named")]
    assert signature_causes(run)


@pytest.mark.parametrize(("count", "is_named"), [(1, False), (2, True)])
def test_a_shifted_row_in_more_than_a_hundred_is_chance(tmp_path: Path, count: int, is_named: bool) -> None:
    rows = rows_of(PLANS["healthy bf16"], 1, 1)
    longest = sorted(rows, key=lambda row: -len(row["response_ids"]))[:count]
    for row in longest:
        row["rollout_log_prob"] = row["old_log_prob"][-1:] + row["old_log_prob"][:-1]
    with TokenLines(tmp_path / "run.jsonl", "mine") as lines:
        for row in rows:
            lines.write(**row)
    named = [cause for cause, _ in causes(tmp_path / "run.jsonl")]
    assert ("log-probs of some rows shifted" in named) is is_named
