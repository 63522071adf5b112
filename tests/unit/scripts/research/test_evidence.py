"""Tables and pictures of docs/evidence.md are those of the results."""

from pathlib import Path

import pytest
from recipe_arguments import ROOT
from research import evidence
from research.evidence import area, interval, main, table
from research.study import Run


def run_of(seed: int, *values: float) -> Run:
    steps = [[10.0 * place, value] for place, value in enumerate(values)]
    curves = {"val-core/digits/acc/mean@1": steps, "rollout_corr/k3_kl": [[1, 0.1], [2, 0.3]]}
    return Run("a", seed, ["trainer.total_training_steps=20"], curves=curves)


def test_a_row_has_every_seed_their_mean_and_what_a_run_reached() -> None:
    assert area(run_of(1, 0.2, 0.4, 0.8)) == pytest.approx(0.45)  # (.3 + .6) / 2
    assert area(run_of(1, 0.2, 0.4)) == pytest.approx(0.15)  # it failed half way
    row = table({"a": [run_of(1, 0.2, 0.4, 0.8), run_of(2, 0.2, 0.4, 0.6)]}).splitlines()[2]
    low, high = interval([0.8, 0.6])
    assert row == f"| a | 0.800, 0.600 | 0.700 | {low:.3f} to {high:.3f} | 0.450, 0.400 | — | 0.2 |"
    assert 0.5 < low < 0.6 < 0.8 < high < 0.9


def test_the_page_has_the_numbers_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "PICTURES", tmp_path)
    monkeypatch.setattr("sys.argv", ["evidence", "controls", "float32"])
    assert main() == 0
    means = [line.split(" | ")[2] for line in capsys.readouterr().out.splitlines()[2:]]
    page = (ROOT / "docs" / "evidence.md").read_text()
    assert len(means) == 6
    assert all(mean in page for mean in means)
    assert [path.name for path in tmp_path.iterdir()] == ["controls_float32.png"]


def test_results_that_are_not_there_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["evidence", "ghost"])
    assert main() == 2
    assert "ghost.jsonl must hold the results of a study" in capsys.readouterr().err
