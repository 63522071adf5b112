"""Healthy steps are made so that a fault in them would be seen, and rates have bounds."""

import json
from pathlib import Path

import pytest
import torch
from planted_faults import false_alarms, false_alarms_in_files
from planted_faults.alarm_counts import PARTS, counted, sums_of, table_of, upper_bound
from planted_faults.false_alarms import LACKING, metrics_without, records, run_of
from planted_faults.false_alarms_in_files import STEPS, Simulated, main, simulated
from small_models import write_small_model
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize(("count", "expected"), [(0, 2.9957), (1, 4.7439), (5, 10.5130)])
def test_bounds_are_those_of_tables_of_the_poisson_distribution(count: int, expected: float) -> None:
    assert upper_bound(count) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("factor", "named"), [(1.0, set()), (1.25, {"temperature"})])
def test_what_differs_between_the_two_models_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, named: set[str]
) -> None:
    """A trainer with larger logits scores at another temperature; with the same ones nothing is named."""
    monkeypatch.setattr(false_alarms, "STEPS_PER_RUN", 4)
    monkeypatch.setattr(false_alarms, "STEPS_AT_ONCE", 2)
    folder = write_small_model(tmp_path)
    engine, trainer = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    trainer.lm_head.weight.data *= factor
    prompts = torch.arange(5, 29).reshape(8, 3)
    steps = list(records(engine, trainer, prompts, stop=2, temperature=1.0, seed=0))
    assert [record.step for record in steps] == [1, 2, 3, 4]
    counts = counted([run_of(metrics_without(steps, LACKING["all fields"]))])
    assert counts.steps == counts.asked["temperature"] == 4
    assert {name for name, count in counts.alarms.items() if count} == named


def test_a_step_counts_once_however_often_it_is_read_and_a_cause_of_the_whole_run_once() -> None:
    healthy = {"missing_mass": 0.0, "missing_mass_z": 0.0, "temperature_r2": 0.0, "temperature_slope": 0.0}
    steps = [{f"rollout_corr/{name}": value for name, value in healthy.items()} for _ in range(30)]
    for number, metrics in enumerate(steps):
        metrics["rollout_corr/k3_kl"] = 1e-4 if number < 15 else 2.5e-3 + 1e-5 * (number % 2)
    steps[3] |= {"rollout_corr/missing_mass": 0.05, "rollout_corr/missing_mass_z": 9.0}
    fewer = [
        {name: value for name, value in metrics.items() if "temperature" not in name} for metrics in steps
    ]
    counts = counted([run_of(steps), run_of(fewer)])
    unspecific, grown = (
        "sampling filter, banned token or raw log-probs",
        "grown, cause not separable by metrics",
    )
    assert counts.steps == counts.asked[unspecific] == counts.asked[grown] == 30
    assert counts.asked["token banned"] == 30
    assert counts.alarms == {
        "not the sampled tokens, or not their log-probs": 1,  # without concentration no filter is named
        unspecific: 1,
        grown: 1,
    }


def test_the_table_has_a_line_for_each_cause_that_was_asked() -> None:
    line = json.dumps(
        {"part": PARTS[3], "counts": {"steps": 500, "asked": {"temperature": 500}, "alarms": {}}}
    )
    table = table_of(sums_of([line, line]))
    assert "| 8 | temperature | 0 | 0 | 0 | 1,000 | 0 | 0.00 | 3.00 |" in table
    assert "staleness" not in table


@pytest.mark.parametrize("trainer", STEPS)
def test_a_healthy_run_in_the_files_of_a_trainer_is_read_and_named_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str
) -> None:
    monkeypatch.setitem(STEPS, trainer, 2)
    counts = counted(Simulated(trainer, "bfloat16", 1.0, 2.0, 0).readings(tmp_path))
    assert counts.alarms == {}
    assert counts.asked["ids outside the vocabulary"] == 2  # by the files themselves
    assert trainer in {run.trainer for run in simulated(1)}


def test_a_study_goes_on_behind_the_runs_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(false_alarms_in_files, "simulated", lambda _: runs)
    runs = [Simulated("NeMo-RL", "float32", 0.6, 0.3, seed) for seed in (1, 2)]
    monkeypatch.setitem(STEPS, "NeMo-RL", 1)
    output = tmp_path / "counts.jsonl"
    for _ in range(2):
        main(["--out", str(output), "--seeds", "2"])
    assert sums_of(output.read_text().splitlines())[PARTS[3]].steps == 2
