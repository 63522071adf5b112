"""Running a study: it goes on where it was interrupted, results of two kinds never mix."""

import os
import threading
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evidence.study import quick
from small_study import STUDY, Trainer, finish

from verl_rc.config.folder_owner import FolderTakenError
from verl_rc.rollout.vllm.fp8_products import Fp8Timings
from verl_rc.study import machine
from verl_rc.study.machine import cores_of, refused
from verl_rc.study.runs import (
    MixedResultsError,
    NotStartedError,
    known_runs,
    missing,
    prepare,
    read_runs,
    run_all,
    run_in,
)
from verl_rc.study.study import Task


def test_a_study_that_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        finish(tmp_path, Trainer(a2=143))
    with (tmp_path / "s.jsonl").open("a") as file:
        file.write('{"arm": "a", "se')  # killed while it wrote
    again = Trainer()
    finish(tmp_path, again)
    assert again.started == ["a2", "b2"]
    assert finish(tmp_path, Trainer()) == []
    assert set(known_runs(tmp_path / "s.jsonl", STUDY)) == {("a", 1), ("b", 1), ("a", 2), ("b", 2)}


def test_runs_of_a_study_share_the_cores(tmp_path: Path) -> None:
    """Two of four at a time: each waits for another one, on the other core."""
    both, seen = threading.Barrier(2, timeout=60), list[int | None]()

    def start(overrides: Sequence[str], planted: str, core: int | None) -> int:
        seen.append(core)
        both.wait()
        return 0

    results = tmp_path / "s.jsonl"
    runs = list(run_all(STUDY, missing(STUDY, {}), tmp_path, results, start, cores=(3, 5)))
    assert sorted(map(str, seen)) == ["3", "3", "5", "5"]
    assert len(runs) == len(known_runs(results, STUDY)) == 4
    assert all(", 1 of " in run.machine for run in runs)


def test_cores_that_a_run_cannot_be_kept_on_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    assert cores_of("") == [None]
    assert cores_of("3,0") == [3, 0]
    with pytest.raises(ArgumentTypeError, match=r"may use, \[0, 3\]; got 0,1"):
        cores_of("0,1")
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ArgumentTypeError, match="none here; got 0"):
        cores_of("0")


def test_a_run_on_one_core_has_a_ray_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    (tmp_path / "says.py").write_text(
        "import os; print(sorted(os.sched_getaffinity(0)), os.environ.get('RAY_TMPDIR'))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/mine")
    before = os.sched_getaffinity(0)
    assert run_in(tmp_path, "says", core=core) == 0
    assert os.sched_getaffinity(0) == before
    cores, folder = (tmp_path / "output.log").read_text().rsplit(maxsplit=1)
    assert cores == f"[{core}]"
    assert folder != "/tmp/mine"
    assert run_in(tmp_path, "says") == 0
    assert (tmp_path / "output.log").read_text() == f"{sorted(os.sched_getaffinity(0))} /tmp/mine\n"


def test_a_run_that_ended_is_kept_when_another_one_fails(tmp_path: Path) -> None:
    """The other core's run ends after the failure, and nothing is started after it."""
    both, started = threading.Barrier(2, timeout=60), list[tuple[int | None, threading.Thread]]()

    def start(overrides: Sequence[str], planted: str, core: int | None) -> int:
        started.append((core, threading.current_thread()))
        both.wait()
        if core == 5:
            return 1
        dict(started)[5].join(60)  # it ends when nothing is left to start
        return Trainer()(overrides, planted, core)

    with pytest.raises(NotStartedError):
        list(run_all(STUDY, missing(STUDY, {}), tmp_path, tmp_path / "s.jsonl", start, cores=(3, 5)))
    assert len(known_runs(tmp_path / "s.jsonl", STUDY)) == 1
    assert len(started) == 2


def test_a_study_that_runs_already_is_not_run_beside_itself(tmp_path: Path) -> None:
    runs = run_all(STUDY, missing(STUDY, {}), tmp_path, tmp_path / "s.jsonl", Trainer())
    next(runs)
    with pytest.raises(FolderTakenError):
        list(run_all(STUDY, missing(STUDY, {}), tmp_path, tmp_path / "s.jsonl", lambda *_: 1))
    assert len(list(runs)) == len(known_runs(tmp_path / "s.jsonl", STUDY)) - 1 == 3


def test_a_damaged_line_of_results_is_named_and_half_a_last_line_is_left_out(tmp_path: Path) -> None:
    finish(tmp_path, Trainer(), "b")
    results = tmp_path / "s.jsonl"
    whole, runs = results.read_bytes(), list(read_runs(results))
    first = whole[: whole.index(b"\n") + 1]
    results.write_bytes(whole + first + first[:-20] + "é".encode()[:1])
    assert list(read_runs(results)) == [*runs, runs[0]]
    results.write_bytes(whole + b"\0\0\n" + whole)
    number = whole.count(b"\n") + 1
    with pytest.raises(ValueError, match=rf"s\.jsonl, line {number} must be a JSON object"):
        known_runs(results, STUDY)


def test_a_run_that_did_not_start_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(NotStartedError, match=r"^a, seed 1, ended before its first step; see .*output\.log$"):
        list(run_all(STUDY, missing(STUDY, {}), tmp_path, tmp_path / "s.jsonl", lambda *_: 1))
    assert not (tmp_path / "s.jsonl").exists()


def test_quick_and_words_choose_arms(tmp_path: Path) -> None:
    assert quick(STUDY, {}) == [("b", 1)]
    finish(tmp_path, Trainer(), "b")
    known = known_runs(tmp_path / "s.jsonl", STUDY)
    assert quick(STUDY, known) == []
    assert missing(STUDY, known) == [("a", 1), ("a", 2)]


def test_results_of_another_configuration_are_refused(tmp_path: Path) -> None:
    finish(tmp_path, Trainer())
    changed = replace(STUDY, arms={"a": ("x=1",), "b": ("x=3",)})
    with pytest.raises(
        MixedResultsError, match=r"holds 'b', seed 1, .*: x=2, x=3 differ\. Move the file away"
    ):
        known_runs(tmp_path / "s.jsonl", changed)


def test_a_run_says_what_was_planted_and_what_it_started_from(tmp_path: Path) -> None:
    told = list[str]()

    def start(overrides: Sequence[str], planted: str, core: int | None) -> int:
        told.append(planted)
        assert f"actor_rollout_ref.model.path={tmp_path / 'long' / 'sft_model'}" in overrides
        return 0

    study = replace(STUDY, task=Task("long", {"NUM_HEADS": "6"}), planted={"b": "top_p:0.5"})
    results = tmp_path / "s.jsonl"
    list(run_all(study, missing(study, {}), tmp_path, results, start))
    assert told == ["", "top_p:0.5"] * 2
    assert len(known_runs(results, study)) == 4
    for changed in (replace(study, planted={}), replace(study, task=Task("long", {"NUM_HEADS": "4"}))):
        with pytest.raises(MixedResultsError, match="differ"):
            known_runs(results, changed)


def test_a_model_of_other_settings_is_not_started_from(tmp_path: Path) -> None:
    (tmp_path / "long" / "sft_model").mkdir(parents=True)
    (tmp_path / "long" / "sft_model" / "config.json").touch()
    (tmp_path / "long" / "settings.json").write_text('{"NUM_HEADS": "6"}')
    prepare(tmp_path, Task("long", {"NUM_HEADS": "6"}))
    with pytest.raises(MixedResultsError, match="other settings: move it away"):
        prepare(tmp_path, Task("long", {"NUM_HEADS": "4"}))


def test_arms_that_this_machine_cannot_run_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without fast fp8 products, or without a cache in fp8, refuses: such a run would count as a
    collapse otherwise."""
    timings = Fp8Timings(bf16=1.0, fp8={"PyTorch's choice": 1e4})
    monkeypatch.setattr(machine, "time_fp8_products", lambda: timings)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    arms = {
        "bf16": (),
        "weights": ("actor_rollout_ref.rollout.quantization=fp8_per_channel",),
        "cache": ("actor_rollout_ref.rollout.kv_cache_dtype=fp8",),
    }
    found = refused(replace(STUDY, arms=arms), list(arms))
    assert set(found) == {"weights", "cache"}
    assert "an fp8 product" in found["weights"]
    assert "key-value cache in fp8" in found["cache"]


def test_asynchronous_arms_need_more_than_one_core() -> None:
    study = replace(STUDY, arms={"k0": (), "k1": ("async=one_step_off",)})
    assert refused(study, list(study.arms)) == {}
    assert set(refused(study, list(study.arms), on_one_core=True)) == {"k1"}
    everywhere = replace(study, common=("async=one_step_off",))
    assert set(refused(everywhere, list(study.arms), on_one_core=True)) == {"k0", "k1"}
