"""The bill of corrections against outcomes: ranks by hand, whose records count, and what the page says of
them."""

from pathlib import Path

import numpy as np
import pytest
from evidence.bill import (
    Bill,
    bills_of,
    correlations,
    interval_of_mean,
    outcomes,
    rank_correlation,
    read_bills,
    section,
    write_bills,
)
from evidence.studies import CORRECTIONS
from recorded_tokens import token_record, write_tokens

from verl_rc.study.runs import Run
from verl_rc.study.study import ACCURACY


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 0.8),  # 1 - 6 * 2 / (4 * 15)
        ([1, 2, 2, 3], [1, 2, 2, 3], 1.0),
        ([1, 1, 2, 3], [3, 1, 2, 4], 3 / np.sqrt(4.5 * 5)),  # ranks .5 .5 2 3 and 2 0 1 3
        ([1, 2, 3], [5, 5, 5], 0.0),
    ],
)
def test_rank_correlation(first: list[float], second: list[float], expected: float) -> None:
    assert rank_correlation(first, second) == pytest.approx(expected)


def run_of(arm: str, seed: int, accuracy: float) -> Run:
    return Run(arm, seed, [], 0, 1.0, {ACCURACY: [(0, 0.1), (60, accuracy)]})


LEARNED = dict(zip(CORRECTIONS, (0.1, 0.3, 0.2, 0.4), strict=True))
RUNS = {
    (f"{k} {name} lr1", seed): run_of(f"{k} {name} lr1", seed, value + 0.01 * seed)
    for k in ("k0", "k4")
    for name, value in LEARNED.items()
    for seed in (1, 2, 3)
}


def bill(
    errors: tuple[float, ...], arm: str = "k4 disabled lr1", recommended: str = "decoupled_token_is"
) -> Bill:
    return Bill(arm, 1, 100, dict(zip(CORRECTIONS, errors, strict=True)), recommended)


def test_small_errors_and_high_accuracies_agree() -> None:
    learned = outcomes(RUNS)
    assert learned["k4 lr1"] == pytest.approx({name: value + 0.02 for name, value in LEARNED.items()})
    assert correlations([bill((4.0, 2.0, 3.0, 1.0)), bill((1.0, 3.0, 2.0, 4.0))], learned) == pytest.approx(
        [1.0, -1.0]
    )


def test_the_page_counts_old_samples_alone() -> None:
    fresh = bill((1.0, 3.0, 2.0, 4.0), "k0 disabled lr1", "disabled")
    text = " ".join("\n".join(section([fresh, bill((4.0, 2.0, 3.0, 1.0))], RUNS)).split())
    assert "of 1 runs with old samples the mean rank correlation is 1.00" in text
    assert "learned 0.320 on average and the most in 0 of the runs; no correction learned 0.120" in text
    assert "clip everywhere 0.420" in text
    assert (
        "| k4 lr1 | 1 | 4.0000, 0.120 | 2.0000, 0.320 | 3.0000, 0.220 | 1.0000, 0.420 | 1.00 | 0.320 |"
        in text
    )
    assert text.index("| k0 lr1 |") < text.index("| k4 lr1 |")


def test_the_interval_of_a_mean_holds_it() -> None:
    low, high = interval_of_mean([[0.0], [1.0]] * 50)
    assert 0.4 < low < 0.45  # 0.5 - 1.64 * 0.05
    assert 0.55 < high < 0.6
    assert interval_of_mean([[0.0, 1.0] * 50]) == (0.5, 0.5)  # of one group nothing is known of others


def test_only_runs_with_records_have_a_bill(tmp_path: Path) -> None:
    for arm in ("k4_disabled_lr1", "k4_bypass_ppo_clip_lr1"):
        folder = tmp_path / f"{arm}_seed1"
        folder.mkdir()
        write_tokens(folder, [token_record(1, [3, 2] * 4, gap=0.02)])
    found = list(bills_of(tmp_path, RUNS))
    assert [(one.arm, one.seed, sorted(one.errors)) for one in found] == [
        ("k4 disabled lr1", 1, sorted(CORRECTIONS))
    ]
    write_bills(tmp_path / "bill.jsonl", found)
    write_bills(tmp_path / "bill.jsonl", [])
    assert read_bills(tmp_path / "bill.jsonl") == found
    assert read_bills(tmp_path / "none.jsonl") == []
