"""docs/leaderboard.md, first steps: correlations over methods that did not suggest them."""

import pytest
from documents import predictions

from verl_rc.study.runs import Run
from verl_rc.study.study import ACCURACY

COSINE, GAP, NORM, SCORE = predictions.SIGNALS


def planted(arm: str, seed: int, cosine: float, accuracy: float) -> Run:
    """Signals follow the cosine in steps 2 to 5, and go the other way in all others."""
    curves = {
        ACCURACY: [(0, 0.25), (60, accuracy)],
        COSINE: [(1, -9.0 * cosine), *((step, cosine) for step in range(2, 6)), (6, -9.0 * cosine)],
        GAP: [(2, -cosine)],
        NORM: [(2, 1.0)],
        SCORE: [(2, seed)],
    }
    return Run(arm, seed, ["trainer.total_training_steps=60"], 0, 1.0, curves)


def test_first_steps_are_judged_by_methods_that_did_not_suggest_them(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["disabled", "seq_mis", "topr", "loss_mode=cispo", "decoupled_token_is"]
    runs = {
        (f"{condition} {method}", seed): planted(f"{condition} {method}", seed, cosine, 0.9 - cosine)
        for condition in ("k0", "bf16")
        for place, method in enumerate(methods[:3])
        for seed in (1, 2, 3)
        for cosine in [place / 10 + seed / 100]
    }
    runs |= {
        (f"k0 {methods[3]}", seed): planted("", seed, 0.3, 0.9) for seed in (1, 2, 3)
    }  # against the order
    runs["k0 decoupled_token_is", 1] = Run("", 1, [], 0, 1.0, {})  # it recorded no signal
    monkeypatch.setattr(predictions, "all_runs", lambda track: (methods, runs))
    rows = [line.split(" | ") for line in predictions.first_step_predictions().splitlines()[2:]]
    found = {(row[0].strip("| "), row[1]): row[2:] for row in rows}
    assert found["short", "k0"][:3] == ["3, 9", "-1.00 (-1.00 to -1.00)", "1.00 (1.00 to 1.00)"]
    assert found["short", "k0"][3] == "0.00 (0.00 to 0.00)"  # all equal
    assert found["noise", "bf16"][:2] == ["3, 9", "-1.00 (-1.00 to -1.00)"]
