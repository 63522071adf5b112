"""The studies of scripts/evidence: every arm is a valid run, and the page says what came of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evidence.studies import STUDIES
from evidence.tables import has_collapsed, headline, interval, minutes_of, section, steps_of_collapse
from recipe_arguments import ROOT, arguments_of
from small_study import STUDY, Trainer, finish

from verl_rc.config.load import load_run_config
from verl_rc.study.runs import Run, known_runs, missing, run_all
from verl_rc.study.study import ACCURACY


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


def test_a_run_that_fails_is_a_result(tmp_path: Path) -> None:
    failed = finish(tmp_path, Trainer(b1=1))[1]
    assert (failed.arm, failed.exit_status) == ("b", 1)
    assert has_collapsed(failed)
    assert failed.curves == {ACCURACY: [(0, 0.25), (1, 0.5)]}
    assert "| b | 0.500, 0.500 | 0.500 |" in "\n".join(
        section("s", STUDY, known_runs(tmp_path / "s.jsonl", STUDY))
    )


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


def test_a_study_says_how_long_it_takes_on_two_cores() -> None:
    """Two runs at a time, but for those that need both cores; a run beside other work does not count for
    all."""
    ended = {
        ("a", seed): Run("a", seed, [], 0, seconds, {}) for seed, seconds in enumerate((60.0, 120.0, 3000.0))
    }
    assert minutes_of(STUDY, {}) == (1.0, 2.0)
    assert minutes_of(STUDY, ended) == (2.0, 4.0)
    assert minutes_of(replace(STUDY, common=("async=one_step_off",)), ended) == (2.0, 8.0)


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
