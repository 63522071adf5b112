"""The studies of scripts/evidence: every arm is a valid run, an interrupted study goes on, results of two
kinds never mix."""

import json
import os
import threading
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evidence import machine
from evidence.machine import cores_of, refused
from evidence.runs import (
    MixedResultsError,
    NotStartedError,
    Run,
    known_runs,
    missing,
    prepare,
    quick,
    run_all,
    run_in,
)
from evidence.studies import ACCURACY, STUDIES, Study, Task
from evidence.tables import has_collapsed, headline, interval, minutes_of, section, steps_of_collapse
from recipe_arguments import ROOT, arguments_of

from verl_rc.config.load import load_run_config
from verl_rc.rollout.vllm.fp8_products import Fp8Timings

STUDY = Study(
    "why?", "this", "that", ("common=1",), {"a": ("x=1",), "b": ("x=2",)}, (1, 2), 1.0, ("a", "b"), ("b",)
)


class Trainer:
    """Writes two validations; ends as told at the arms and seeds in ``ends``."""

    def __init__(self, **ends: int) -> None:
        self.ends, self.started = ends, list[str]()

    def __call__(self, overrides: Sequence[str], planted: str, core: int | None) -> int:
        given = dict(text.split("=", 1) for text in overrides)
        name = ("a" if given["x"] == "1" else "b") + given["trainer.seed"]
        self.started.append(name)
        folder = Path(given["trainer.default_local_dir"])
        folder.mkdir(parents=True)
        lines = [{"step": step, ACCURACY: 0.25 * (1 + step), "other": 1.0} for step in (0, 1)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return self.ends.get(name, 0)


def finish(folder: Path, start: Trainer, *words: str) -> list[Run]:
    results = folder / "s.jsonl"
    return list(
        run_all(
            STUDY, missing(STUDY, known_runs(results, STUDY), words), folder / f"{start.ends}", results, start
        )
    )


@pytest.mark.parametrize("name", STUDIES)
def test_every_arm_is_a_run_that_can_start(name: str) -> None:
    study = STUDIES[name]
    assert set(study.quick) <= study.arms.keys()
    assert study.would_change
    places = ["actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v"]
    for given in study.arms.values():
        load_run_config([*study.common, *given, *places])
        keys = [override.partition("=")[0] for override in (*study.common, *given)]
        assert len(keys) == len(set(keys)), "what is compared with results on disk has no order"


@pytest.mark.parametrize("name", STUDIES)
def test_the_recipe_of_a_study_runs_it_as_the_page_says(name: str) -> None:
    command = f"python {' '.join(arguments_of(ROOT / 'recipes' / 'evidence' / f'{name}.sh'))}"
    assert f"`{command}`" in " ".join(section(name, STUDIES[name], {})).replace("\n", " ")


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


def test_a_run_that_fails_is_a_result(tmp_path: Path) -> None:
    failed = finish(tmp_path, Trainer(b1=1))[1]
    assert (failed.arm, failed.exit_status) == ("b", 1)
    assert has_collapsed(failed)
    assert failed.curves == {ACCURACY: [(0, 0.25), (1, 0.5)]}
    assert "| b | 0.500, 0.500 | 0.500 |" in "\n".join(
        section("s", STUDY, known_runs(tmp_path / "s.jsonl", STUDY))
    )


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


def test_the_interval_covers_seeds_and_prompts() -> None:
    """One seed: the quantiles of a binomial share, by its normal limit. Many prompts: those of seeds drawn
    with replacement."""
    low, high = interval([0.3], prompts=4000)
    assert (low, high) == pytest.approx(
        (0.3 - 1.645 * np.sqrt(0.21 / 4000), 0.3 + 1.645 * np.sqrt(0.21 / 4000)), abs=6e-4
    )
    assert interval([0.0, 1.0], prompts=10) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "fell"), [([0.2, 0.6, 0.55], False), ([0.2, 0.6, 0.45], True), ([], True)]
)
def test_a_collapse_is_a_fall_below_the_best(values: list[float], fell: bool) -> None:
    assert has_collapsed(Run("a", 1, [], 0, 1.0, {ACCURACY: list(enumerate(values))})) is fell


def test_a_collapse_is_told_with_its_step() -> None:
    """From the validation on after which the run never came back."""
    values = {"fell": [0.2, 0.6, 0.4, 0.55, 0.45, 0.3], "rose": [0.2, 0.3], "failed": []}
    runs = [
        Run("a", seed, [], 1, 1.0, {ACCURACY: list(enumerate(of_run))})
        for seed, of_run in enumerate(values.values())
    ]
    assert steps_of_collapse(runs) == {0: 4}


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
    """A CPU without fast fp8 products refuses: such a run would count as a collapse otherwise."""
    timings = Fp8Timings(bf16=1.0, fp8={"PyTorch's choice": 1e4})
    monkeypatch.setattr(machine, "time_fp8_products", lambda: timings)
    study = replace(
        STUDY, arms={"bf16": (), "weights": ("actor_rollout_ref.rollout.quantization=fp8_per_channel",)}
    )
    found = refused(study, list(study.arms))
    assert set(found) == {"weights"}
    assert "fp8" in found["weights"]


def test_a_study_says_how_long_it_takes_on_two_cores() -> None:
    """Two runs at a time, but for those that need both cores; a run beside other work does not count for
    all."""
    ended = {
        ("a", seed): Run("a", seed, [], 0, seconds, {}) for seed, seconds in enumerate((60.0, 120.0, 3000.0))
    }
    assert minutes_of(STUDY, {}) == (1.0, 2.0)
    assert minutes_of(STUDY, ended) == (2.0, 4.0)
    assert minutes_of(replace(STUDY, common=("async=one_step_off",)), ended) == (2.0, 8.0)


def test_asynchronous_arms_need_more_than_one_core() -> None:
    study = replace(STUDY, arms={"k0": (), "k1": ("async=one_step_off",)})
    assert refused(study, list(study.arms)) == {}
    assert set(refused(study, list(study.arms), on_one_core=True)) == {"k1"}
    everywhere = replace(study, common=("async=one_step_off",))
    assert set(refused(everywhere, list(study.arms), on_one_core=True)) == {"k0", "k1"}


def test_the_headline_has_every_seed_and_waits_for_both_arms() -> None:
    runs = {
        (arm, seed): Run(arm, seed, [], 0, 0.0, {ACCURACY: [(0, 0.25), (1, end + seed / 10)]})
        for arm, end in (("k8 disabled lr1", 0.0), ("k8 decoupled_seq_is lr1", 0.5))
        for seed in (1, 2, 3)
    }
    (told,) = headline(STUDIES["staleness"], runs)
    assert "from 0.250 to 0.100, 0.200, 0.300 (one" in told.replace("\n", " ")
    assert "to 0.600, 0.700, 0.800 with sequence" in told.replace("\n", " ")
    assert (
        headline(STUDIES["staleness"], {key: run for key, run in runs.items() if key[0] == "k8 disabled lr1"})
        == []
    )


def test_a_partial_study_says_so_and_has_no_empty_column(tmp_path: Path) -> None:
    assert "Found" not in "".join(section("s", STUDY, {}))
    run_seed_1 = missing(STUDY, {})[:3]
    results = tmp_path / "s.jsonl"
    list(run_all(STUDY, run_seed_1, tmp_path, results, Trainer()))
    page = "\n".join(section("s", STUDY, known_runs(results, STUDY))).replace("\n", " ")
    assert "3 of 4 runs are here" in page
    assert "1 arms have one seed only" in page
    assert "mean ESS" not in page
    assert "With `--quick`, some 0 minutes, seed 1 alone: b 0.500." in page
