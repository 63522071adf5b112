"""Every golden case of rollout correction: weights, masks and metrics (tests/golden/README.md has their
origin)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bypass_cases import with_verl_names

from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction

GOLDEN = Path(__file__).parents[2] / "golden"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "rollout_correction.json").read_text())["cases"]


def as_tensor(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def tolerance(name: str) -> float:
    """The golden standard deviations carry sqrt(1e-9) of noise: their means divide by count + 1e-8."""
    return 1e-4 if name.endswith("_std") else 1e-7


@pytest.mark.parametrize("index", range(len(CASES)))
def test_weights_mask_and_metrics(index: int) -> None:
    case = CASES[index]
    config = RolloutCorrectionConfig(**case["config"])
    mask = as_tensor(case["response_mask"]).bool()
    result = compute_rollout_correction(
        as_tensor(case["old_log_probs"]), as_tensor(case["rollout_log_probs"]), mask, config
    )
    expected = case["expected"]
    if expected["rollout_is_weights"] is None:
        assert result.weights is None
    else:
        assert result.weights is not None
        torch.testing.assert_close(
            result.weights, as_tensor(expected["rollout_is_weights"]), rtol=1e-5, atol=1e-5
        )
    assert torch.equal(result.keep_mask & mask, as_tensor(expected["response_mask"]).bool())
    metrics = with_verl_names(result.metrics(), config)
    wrong = {
        name: (metrics.get(name), value)
        for name, value in expected["metrics"].items()
        if metrics.get(name) != pytest.approx(value, rel=1e-5, abs=tolerance(name))
    }
    assert not wrong


def test_presets_have_their_golden_fields() -> None:
    golden = json.loads((GOLDEN / "presets.json").read_text())["presets"]
    for name, fields in golden.items():
        config = RolloutCorrectionConfig.from_preset(name).model_dump()
        assert {key: config[key] for key in fields} == fields
    assert set(golden) <= set(PRESETS)
