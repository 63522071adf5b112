"""The writer that any trainer may copy: it stands alone, and what it writes is what is read."""

import ast
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from small_runs import ROOT

from verl_rc.records.token_records.token_lines import TokenLines
from verl_rc.records.token_records.token_record import DamagedRecordError, required_facts
from verl_rc.records.token_records.token_rows import record_of_rows, records_by_step

SOURCE = ROOT / "verl_rc/records/token_records/token_lines.py"
ROW = {"response_mask": [1, 0], "rollout_log_prob": [-0.5, -1.0], "old_log_prob": [-0.25, -1.0]}


def test_it_can_be_copied() -> None:
    text = SOURCE.read_text()
    assert len(text.splitlines()) <= 80
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {n.name for one in imports if isinstance(one, ast.Import) for n in one.names}
    names |= {str(one.module) for one in imports if isinstance(one, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_arrays_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "step_000004.rank_0.jsonl"
    with TokenLines(path, "mine", temperature=0.5) as lines:
        lines.write(4, np.array([True, False]), np.array([-0.5, math.nan], "float32"), [-0.25, -math.inf])
        assert not path.exists()
    facts, row = map(json.loads, path.read_text().splitlines())
    assert facts == {"token_record": 1, "trainer": "mine", "temperature": 0.5}
    assert row == {
        "step": 4,
        "response_mask": [1, 0],
        "rollout_log_prob": [-0.5, None],
        "old_log_prob": [-0.25, None],
    }


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TokenLines(tmp_path / "x.jsonl", "mine"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_defaults_of_what_a_row_may_leave_out() -> None:
    rows = [{**ROW, "prompt_ids": prompt, "advantage": 2.0, "version": 3} for prompt in ([1], [2], [1])]
    record = record_of_rows({"trainer": "mine"}, 7, rows)
    assert record.rows["group"].tolist() == [0, 1, 0]
    assert record.rows["row"].tolist() == [0, 1, 2]
    assert set(record.rows["chosen_by"].tolist()) == {"random"}
    assert record.tokens["advantage"].tolist() == [2.0] * 6
    assert record.tokens["version"].tolist() == [3] * 6
    assert (record.step, record.lengths.tolist()) == (7, [2, 2, 2])


def test_steps_out_of_order_are_sorted() -> None:
    rows = [{**ROW, "step": step} for step in (3, 1, 3, 2)]
    found = [(record.step, len(record.lengths)) for record in records_by_step({"trainer": "mine"}, rows)]
    assert found == [(1, 1), (2, 1), (3, 2)]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({**ROW, "entropy": [0.5]}, "row 0: .* response_mask has 2, entropy 1"),
        ({**ROW, "response_mask": [1, 2]}, "response_mask must be 0 or 1"),
        ({**ROW, "response_ids": [1.5, 2]}, "response_ids must be whole numbers"),
        ({**ROW, "rollout_log_prob": None}, "every row of step 1 must have response_mask|rollout_log_prob"),
        ({**ROW, "rollout_log_prob": ["a", "b"]}, "row 0: could not convert"),
        ({**ROW, "rollout_log_prob": [1.0, 1.0]}, "1 of 1 sampled tokens have more"),
    ],
)
def test_rows_that_are_none_say_why(row: dict[str, object], why: str) -> None:
    with pytest.raises(DamagedRecordError, match=why):
        record_of_rows({}, 1, [row])


def test_a_step_must_be_a_whole_number() -> None:
    with pytest.raises(DamagedRecordError, match=r"its step as a whole number, got 1\.5"):
        list(records_by_step({}, [{**ROW, "step": 1.5}]))


@pytest.mark.parametrize(
    ("facts", "why"), [({}, "no facts"), ({"token_record": 2}, "version 2 of the record")]
)
def test_facts_of_another_version(facts: dict[str, object], why: str) -> None:
    with pytest.raises(DamagedRecordError, match=why):
        required_facts(facts)
