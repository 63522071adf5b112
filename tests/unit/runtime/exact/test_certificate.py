"""The certificate in words: equal only when every operation of every batch is, and the first that is not."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from small_models import write_small_model

from verl_rc import cli
from verl_rc.runtime.exact import certificate
from verl_rc.runtime.exact.captured_trainer import ComparedOperation, compare_rows
from verl_rc.runtime.exact.certificate import Certificate

ATTENTION, NORM = "model.layers.1.self_attn.attn", "model.norm"


def equal(name: str, decodes: bool = False) -> ComparedOperation:
    return ComparedOperation(name, decodes, 3, 0, 0.0, None)


def certified(*operations: ComparedOperation, cached: int = 5) -> Certificate:
    return Certificate({"1": [equal(NORM)], "7": [*operations]}, cached)


def test_all_equal_is_exact() -> None:
    shown = certified(equal(ATTENTION), equal(ATTENTION, decodes=True))
    assert shown.is_exact
    lines = list(shown.lines())
    assert [line.split() for line in lines if line.startswith("attention")] == [
        ["attention", "equal", "equal"]
    ]
    assert lines[-1] == "exact: engine and trainer agree to the last bit"


def test_one_row_that_differs_is_named() -> None:
    wrong = ComparedOperation(ATTENTION, True, 3, 1, 2.5e-7, (4, 17))
    shown = certified(equal(ATTENTION), wrong, ComparedOperation(NORM, True, 3, 3, 0.5, (0, 1)))
    assert not shown.is_exact
    place = f"{ATTENTION}, batch of 7, decoding, sequence 4, position 17"
    lines = list(shown.lines())
    assert next(line for line in lines if line.startswith("attention")).split(None, 3) == [
        *("attention", "equal", "2.5e-07"),
        place,
    ]
    assert lines[-1] == f"not exact; the first operation that differs is {place}"


@pytest.mark.parametrize("sizes", [[math.nan, 1.0], [1.0, math.nan]])
def test_nan_is_the_largest_difference(sizes: Sequence[float]) -> None:
    shown = certified(*(ComparedOperation(NORM, False, 3, 1, size, (0, 0)) for size in sizes))
    assert next(line for line in shown.lines() if line.startswith("norm")).split()[1] == "nan"


@pytest.mark.parametrize("empty", [Certificate({}, 5), Certificate({"1": [equal(NORM)]}, 0)])
def test_what_was_not_compared_is_not_shown(empty: Certificate) -> None:
    assert not empty.is_exact
    assert list(empty.lines())[-1].startswith("not shown: ")


def test_rows_are_compared_by_phase_and_nan_differs() -> None:
    places = [(0, 0, False), (1, 0, False), (0, 1, True)]
    mine = torch.tensor([[1.0, 2.0], [3.0, math.nan], [5.0, 6.0]])
    theirs = torch.tensor([[1.0, 2.5], [3.0, math.nan], [5.0, 6.0]])
    prefill, decoding = compare_rows("x", places, mine, theirs)
    assert (prefill.rows, prefill.different_rows, prefill.first_difference) == (2, 2, (0, 0))
    assert math.isnan(prefill.largest_difference)
    assert decoding == ComparedOperation("x", True, 1, 0, 0.0, None)


@pytest.mark.parametrize(("cached", "status"), [(5, 0), (0, 1)])
def test_the_exit_status_tells(
    cached: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def certify(*arguments: object, **options: object) -> Certificate:
        calls.append((arguments, options))
        return certified(equal(ATTENTION), cached=cached)

    monkeypatch.setattr(certificate, "certify", certify)
    assert cli.main(["exact", "org/model", "--dtype", "float32", "--ordinary"]) == status
    assert calls == [(("org/model", "float32", None), {"exact": False})]
    assert "attention" in capsys.readouterr().out


class FakeProcess:
    """Answers as an engine or a trainer whose numbers are all equal."""

    started: ClassVar[list["FakeProcess"]] = []

    def __init__(self, target: str, environment: object, wait: bool, **arguments: Any) -> None:
        self.arguments = arguments
        self.started.append(self)

    def answer(self) -> None:
        pass

    def call(self, method: str, *_: object) -> object:
        return 5 if method == "sample" else [equal(NORM)]

    def end(self) -> None:
        pass


@pytest.mark.parametrize("exact", [True, False])
def test_both_sides_compute_in_exact_mode_or_both_as_usual(
    exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProcess, "started", [])
    monkeypatch.setattr(certificate, "ChildProcess", FakeProcess)
    monkeypatch.setattr(certificate, "usable_cores", lambda: 1)
    monkeypatch.setattr(os, "environ", environment := {})
    assert certificate.certify(str(write_small_model(tmp_path)), "float32", exact=exact).is_exact
    engine, trainer = (process.arguments for process in FakeProcess.started)
    assert engine["options"].exact is trainer["exact"] is exact
    assert ("MKL_CBWR" in environment) is exact


def test_a_file_without_prompts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.txt").write_text("\n \n")
    monkeypatch.setattr(certificate, "load_tokenizer", lambda *_, **__: None)
    with pytest.raises(ValueError, match="a prompt in each line, got none in"):
        certificate._read_prompts("m", tmp_path / "prompts.txt")
