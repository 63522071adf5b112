"""Recorded batches through verl and through this project: what is read, asked, compared and said; verl is
played by hand."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evidence import against_verl, in_verl
from evidence.against_verl import (
    CASES,
    RUNS,
    Batch,
    Compared,
    Question,
    Recorded,
    batches_of,
    compare,
    largest_difference,
    ours,
    pairs_of_metrics,
    read_lines,
    section,
    verls,
    write_lines,
)
from recorded_tokens import token_record, write_tokens
from torch import Tensor

from verl_rc.config.load import load_run_config
from verl_rc.study.runs import folder_of

ROOT = Path(__file__).resolve().parents[3]
PRESETS_OF_VERL = json.loads((ROOT / "tests" / "golden" / "presets.json").read_text())["presets"]
RATIOS = torch.tensor([[0.3, 3.0, 1.0], [1.0, 0.6, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False], [True, False, False]])
BATCH = {"train": RATIOS.log() - 1.0, "rollout": torch.full((4, 3), -1.0), "mask": MASK}
TOKEN_BAND = "rollout_rs=token_k1 rollout_rs_threshold=0.5_4.0"


def compared(
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    case: str,
    *,
    mask: Tensor = MASK,
    metrics: Mapping[str, float] | None = None,
    weights: Tensor | None = None,
) -> tuple[Compared, Tensor]:
    """A case on the one batch with what verl is made to answer; also returns the mask that it was asked
    about."""
    masks = list[Tensor]()

    def ask(batches: Sequence[Batch], questions: Sequence[Question]) -> Sequence[Mapping[str, Any]]:
        masks.extend(batches[place]["mask"] for place, _ in questions)
        return [{"weights": weights, "mask": mask, "metrics": metrics or {}} for _ in questions]

    monkeypatch.setattr(against_verl, "CASES", {group: [case]})
    (line,) = compare([Recorded("k0 bf16", 5, BATCH)], ask)
    return line, masks[0]


@pytest.mark.parametrize("arm", RUNS.arms)
def test_every_run_that_records_batches_can_start(arm: str) -> None:
    places = ["actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v"]
    assert load_run_config([*RUNS.common, *RUNS.arms[arm], *places]).trainer.token_records.full_freq == 5


def test_whole_batches_are_read_and_other_records_are_not(tmp_path: Path) -> None:
    run = folder_of(tmp_path, "k4 fp8", 1)
    run.mkdir()
    rows = {"chosen_by": ["random"] * 3, "inclusion": [1.0] * 3}
    write_tokens(run, [token_record(1), token_record(5, (4, 2, 3), gap=0.25, why="full", **rows)])
    (found,) = batches_of(tmp_path)
    assert (found.samples, found.step) == ("k4 fp8", 5)
    assert found.batch["mask"].sum(dim=1).tolist() == [4, 2, 3]
    log_ratio = (found.batch["train"] - found.batch["rollout"])[2, :3]
    assert log_ratio.tolist() == pytest.approx([0.75, -0.75, 0.75])


def test_every_case_is_one_that_both_sides_have() -> None:
    assert sorted(CASES["presets of the same name"]) == sorted(PRESETS_OF_VERL)
    for case in [case for of_group in CASES.values() for case in of_group]:
        assert ours(case).effective_fields() is not None
        told = verls(case)
        assert told in PRESETS_OF_VERL if isinstance(told, str) else set(told) <= set(in_verl.FIELDS)


def test_tokens_that_one_side_keeps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ratios 0.3, 3, 1, 1, 0.6, 1 and 1 the band 0.5 to 4 keeps all but 0.3, and its inverse 0.25 to 2
    all but 3."""
    executed = MASK & (RATIOS < 2)
    line, _ = compared(monkeypatch, "a", TOKEN_BAND, mask=executed)
    assert (line.rows, line.tokens, line.kept, line.kept_by_verl, line.kept_otherwise) == (4, 7, 6, 6, 2)
    line, _ = compared(monkeypatch, "a", f"{TOKEN_BAND} k1_bound_convention=inverse", mask=executed)
    assert (line.kept, line.kept_by_verl, line.kept_otherwise) == (6, 6, 0)


def test_weights_and_metrics_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = RATIOS.clamp(max=2.0) * MASK
    given = "rollout_is=token rollout_is_threshold=2.0"
    k3 = sum(ratio - 1 - math.log(ratio) for ratio in (0.3, 3.0, 0.6)) / 7
    ess = (0.3 + 2 + 0.6 + 4) ** 2 / 7 / (0.09 + 4 + 0.36 + 4)
    names = ("k3_kl", "rollout_is_eff_sample_size", "kl", "unknown")
    metrics = dict(zip([f"rollout_corr/{name}" for name in names], (k3, ess, 0.5, 1.0), strict=True))
    line, _ = compared(monkeypatch, "a", given, weights=weights, metrics=metrics)
    assert line.weights is not None
    assert line.weights < 1e-6
    assert line.metrics == 4  # the third is asked of two numbers here, the last is not known
    kl = -math.log(0.3 * 3.0 * 0.6) / 7
    assert line.differing == {"kl": [pytest.approx(kl, rel=1e-5), 0.5]}
    weights[0, 1] = 1.6
    line, _ = compared(monkeypatch, "a", given, weights=weights)
    assert line.weights == pytest.approx(0.25)


def test_rows_without_tokens_are_added_for_one_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the row weights is that of four rows: 0.9, 0.6, 1 and 1."""
    name, total = "rollout_corr/rollout_is_seq_mean", 0.9 + 0.6 + 1 + 1
    for group, rows in (("other", 4), ("a quarter more rows, without tokens", 5)):
        mask, weights = torch.zeros(rows, 3, dtype=torch.bool), torch.zeros(rows, 3)
        mask[:4], weights[:4] = MASK, MASK * torch.tensor([[0.9], [0.6], [1.0], [1.0]])
        answer = {"mask": mask, "weights": weights, "metrics": {name: total / rows}}
        line, asked = compared(monkeypatch, group, "decoupled_seq_is", **answer)
        assert asked.equal(mask)
        assert (line.rows, line.tokens, line.kept_otherwise) == (rows, 7, 0)
        assert line.weights is not None
        assert line.weights < 1e-6
        expected = {} if rows == 4 else {"rollout_is_seq_mean": [0.875, 0.7]}
        assert line.differing == expected


def test_a_weight_that_verl_alone_has_at_0_is_infinitely_off() -> None:
    assert largest_difference(torch.tensor([0.0, 1.1]), torch.tensor([0.0, 1.0])) == pytest.approx(0.1)
    assert largest_difference(torch.tensor([0.5]), torch.tensor([0.0])) == math.inf


def test_fractions_of_k1_have_the_other_name() -> None:
    high, low, other = (
        f"rollout_rs_token_{name}" for name in ("k1_fraction_high", "k1_fraction_low", "k2_fraction_high")
    )
    here = {f"rollout_corr/{high}": 1.0, f"rollout_corr/{low}": 2.0, f"rollout_corr/{other}": 3.0}
    pairs = pairs_of_metrics(here, {f"rollout_corr/{high}": 9.0, f"rollout_corr/{other}": 8.0}, False)
    assert pairs == {low: (2.0, 9.0), other: (3.0, 8.0)}


@pytest.mark.parametrize(("level", "own_name"), [("sequence", "raw_max"), ("token", "max")])
def test_extremes_of_row_weights_are_compared_raw(
    monkeypatch: pytest.MonkeyPatch, level: str, own_name: str
) -> None:
    """The products of the rows are 0.9, 0.6, 1 and 1, all below the bound of 2 but above that of 0.95."""
    case, largest = f"rollout_is={level} rollout_is_threshold=0.95", {"sequence": 1.0, "token": 0.95}[level]
    weights, metrics = torch.ones(4, 3) * MASK, {"rollout_corr/rollout_is_max": largest}
    line, _ = compared(monkeypatch, "a", case, weights=weights, metrics=metrics)
    assert line.differing == {}
    line, _ = compared(monkeypatch, "a", case, weights=weights, metrics={"rollout_corr/rollout_is_max": 5.0})
    assert line.differing == {f"rollout_is_{own_name}": [pytest.approx(largest, rel=1e-5), 5.0]}


class Helper:
    """Plays verl's module: says what it was given."""

    class RolloutCorrectionConfig:
        @staticmethod
        def some_preset() -> SimpleNamespace:
            return SimpleNamespace(**dict.fromkeys(in_verl.FIELDS), bypass_mode=True)

    @staticmethod
    def compute_rollout_correction_and_rejection_mask(
        train: Tensor, rollout: Tensor, mask: Tensor, **fields: Any
    ) -> tuple[Any, Tensor, dict[str, Any]]:
        weights = fields.get("rollout_is") and SimpleNamespace(
            batch={"rollout_is_weights": (train - rollout).exp()}
        )
        return weights, mask * (train > -1.5).long(), {"dtype": train.dtype, **fields}


def test_verl_is_asked_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.rollout_corr_helper", Helper)
    answer = in_verl.correction_by_verl(BATCH, {"rollout_is": "token"})
    assert answer["weights"].dtype == torch.float32
    assert answer["mask"].tolist() == (MASK & (RATIOS > 0.7)).tolist()
    assert answer["metrics"] == {"dtype": torch.float64, "rollout_is": "token"}
    answer = in_verl.correction_by_verl(BATCH, "some_preset")
    assert answer["weights"] is None
    assert answer["metrics"] == {"dtype": torch.float64, **dict.fromkeys(in_verl.FIELDS)}


def line(
    group: str, kept: tuple[int, int, int], differing: dict[str, list[float]], step: int = 5
) -> Compared:
    return Compared("k4 fp8", step, group, f"of {group}", 20, 100, 2e-7, *kept, 10, differing)


def test_the_page_says_what_differs() -> None:
    ess = "rollout_is_eff_sample_size"
    lines = [
        line("same", (100, 100, 0), {}),
        line("ess", (100, 100, 0), {ess: [0.5, 0.4]}, 5),
        line("ess", (100, 100, 0), {ess: [0.5, 0.25], "zzz": [1.0, 2.0]}, 10),
        line("band", (60, 80, 40), {"kl": [1.0, 2.0]}),
    ]
    text = " ".join("\n".join(section(lines)).split())
    assert "2 whole batches (k4 fp8; k4: up to four steps old), 200 tokens, 3 ways to correct them." in text
    assert "Weights differ by 2e-07 of themselves at most." in text
    assert "Both keep the same tokens everywhere but with band. Where they do" in text
    assert f"metrics are the same within 1e-05 but for `{ess}` and `zzz`, and but for" in text
    assert "| same | 1 | 2e-07 | 0 of 100 | 0 of 10 | nothing |" in text
    assert f"| ess | 1 | 2e-07 | 0 of 200 | 3 of 20 | `{ess}` 0.5, in verl 0.25 (of rows;" in text
    assert "`zzz` 1, in verl 2 |" in text
    # Both keep 50 tokens: (60 + 80 - 40) / 2. Of verl's 80 that leaves 30.
    assert (
        "40 of 100 | 1 of 10 | verl keeps 80% of the tokens, this project 60%; of what verl keeps, so much "
        "is outside" in text
    )
    assert "band of train/rollout: k4 fp8 38% |" in text
    assert "everywhere. Where they do" in " ".join("\n".join(section(lines[:1])).split())


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    lines = [line("same", (100, 100, 0), {"kl": [0.1, 0.2]})]
    write_lines(tmp_path / "lines.jsonl", lines)
    assert read_lines(tmp_path / "lines.jsonl") == lines
    assert read_lines(tmp_path / "none.jsonl") == []
