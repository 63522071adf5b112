"""Which rows of the table are asked of token records, by the fields that are there."""

from pathlib import Path

import pytest
from planted_tokens import FIRST_ID, PLANS, STOP, rows_of

from verl_rc.algorithm.health.cause_table import LARGE
from verl_rc.insight.diagnosis import DiagnosisRequest, diagnose
from verl_rc.insight.run_folder import read_run
from verl_rc.insight.verdict import Verdict, verdict_of
from verl_rc.records.token_records.token_lines import TokenLines

DISTRIBUTIONS = ("entropy", "sum_pi_squared", "varentropy")
IDS = ("prompt_ids", "response_ids")


def written(folder: Path, plan: str, without: tuple[str, ...] = (), steps: int = 3, **facts: object) -> Path:
    path = folder / "run.jsonl"
    with TokenLines(path, "mine", **facts) as lines:
        for step in range(1, steps + 1):
            for row in rows_of(PLANS[plan], 1, step):
                lines.write(**{name: value for name, value in row.items() if name not in without})
    return path


def verdict_at(path: Path) -> Verdict:
    return verdict_of(read_run(path))


def test_a_temperature_that_the_facts_leave_open_counts_as_1(tmp_path: Path) -> None:
    """A hook may write null."""
    statements = verdict_at(written(tmp_path, "temperature 0.9", temperature=None)).statements
    (found,) = (statement for statement in statements if statement.topic == "gap")
    assert found.cause == "temperature"
    assert found.evidence["temperature"] == 1.0


@pytest.mark.parametrize(
    ("without", "unasked"),
    [
        ((), {"one engine differs from the others"}),
        (
            ("varentropy",),
            {"one engine differs from the others", "sampled from another distribution than reported"},
        ),
        (
            DISTRIBUTIONS,
            {
                "one engine differs from the others",
                "sampled from another distribution than reported",
                "sampling filter not mirrored",
                "token banned",
            },
        ),
    ],
)
def test_rows_say_which_fields_they_need(tmp_path: Path, without: tuple[str, ...], unasked: set[str]) -> None:
    verdict = verdict_at(written(tmp_path, "healthy bf16", without, stop_token_ids=[STOP + FIRST_ID]))
    assert {row.cause for row in verdict.rows if not row.is_asked} == unasked
    assert verdict.level != "fault"
    needs = {row.cause: row.needs for row in verdict.rows}
    assert needs["log-probs shifted"] == ""
    assert needs["temperature"] == "entropy or prompt_ids and response_ids of several samples a prompt"
    assert needs["not the sampled tokens, or not their log-probs"] == needs["temperature"]
    assert needs["one engine differs from the others"] == "engine"
    assert len(verdict.unasked) == len(unasked)


def test_without_ids_and_entropies_a_temperature_is_not_asked(tmp_path: Path) -> None:
    path = written(tmp_path, "temperature 0.9", (*DISTRIBUTIONS, *IDS))
    assert "temperature" in {row.cause for row in verdict_at(path).rows if not row.is_asked}
    assert any(note.startswith("not asked: temperature") for note in diagnose(DiagnosisRequest(path)).notes)


def test_the_temperature_of_the_records_stands_in_the_sentence(tmp_path: Path) -> None:
    path = written(tmp_path, "raw at 0.7", DISTRIBUTIONS, temperature=0.7)
    first = next(statement for statement in verdict_at(path).statements if statement.level == "fault")
    assert first.cause == "raw log-probs at another temperature"
    assert "samples at temperature 0.70 and reports log-probs at 1.0" in first.sentence


def test_engines_are_compared_without_sums_of_squares(tmp_path: Path) -> None:
    path = written(tmp_path, "one engine of two stale", DISTRIBUTIONS)
    (cause,) = {statement.cause for statement in verdict_at(path).statements if statement.level == "fault"}
    assert cause == "one engine differs from the others"


@pytest.mark.parametrize(("engine", "is_large"), [("float32", True), ("bfloat16", False), ("int4", False)])
def test_the_precision_that_records_state_says_what_rounding_can_make(
    tmp_path: Path, engine: str, is_large: bool
) -> None:
    """An engine whose logits are rounded to bfloat16, by what its records say of it."""
    path = written(tmp_path, "healthy bf16", steps=6, engine_dtype=engine, trainer_dtype="float32")
    large = [one for one in verdict_at(path).statements if one.cause == LARGE.name]
    assert [one.confidence for one in large] == ["possible"] * is_large
    if large:
        assert "where rounding in float32 makes 0.0001" in large[0].sentence
