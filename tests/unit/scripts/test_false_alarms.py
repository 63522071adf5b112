"""Healthy steps are made so that a fault in them would be seen, and rates have bounds."""

from pathlib import Path

import pytest
import torch
from planted_faults import false_alarms
from planted_faults.false_alarms import LACKING, judged, metrics_without, records, upper_bound
from small_models import write_small_model
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize(("count", "expected"), [(0, 2.9957), (1, 4.7439), (5, 10.5130)])
def test_bounds_are_those_of_tables_of_the_poisson_distribution(count: int, expected: float) -> None:
    assert upper_bound(count) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("factor", "named"), [(1.0, set()), (1.25, {"8 temperature"})])
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
    steps_named, said = judged(metrics_without(steps, LACKING["all fields"]))
    assert set(steps_named) == said == named
