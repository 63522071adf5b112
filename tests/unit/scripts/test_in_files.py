"""A planted run in the files of other trainers names what it is, and nothing without the fields."""

from pathlib import Path

import pytest
from planted_faults.faults import ARMS
from planted_faults.foreign_layouts import WRITERS
from planted_faults.in_files import readings, steps_of
from planted_faults.planted_tokens import PLANS, rows_of

from verl_rc.data.token_lines import TokenLines


@pytest.mark.parametrize("arm", ["temperature 0.9"])
def test_every_layout_and_two_log_probs_alone(tmp_path: Path, arm: str) -> None:
    with TokenLines(tmp_path / "run.jsonl", "mine") as lines:
        for step in (1, 4):
            for row in rows_of(PLANS[arm], 1, step):
                lines.write(**{**row, "version": [step - 1] * len(row["response_mask"])})
    steps = steps_of(tmp_path / "run.jsonl")
    assert {row["version"] for row in steps[4]} == {3}
    found = readings(steps, ARMS[arm], tmp_path / "no model", 1.0)
    named = {name: one.outcome for name, one in found}
    alone = "right" if arm.startswith("healthy") else "not seen"
    assert named == {**dict.fromkeys(WRITERS, "right"), "log-probs and mask alone": alone}
