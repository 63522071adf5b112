"""A study: every run is kept, what is kept is not run again, and results are the plan of the same study."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recipe_arguments import ROOT, arguments_of
from research import study
from research.study import Run, StudyError, curves_of, missing, place_of, plans_of_arms, read_runs, run_all

from verl_rc.config.load import load_run_config

RECIPE = "recipes/quickstart_digits_cpu.sh"
PLANS = [Run(arm, seed, [f"x={arm}", f"trainer.seed={seed}"]) for seed in (1, 2) for arm in ("a", "b")]
RESULTS = sorted((ROOT / "scripts" / "research" / "results").glob("*.jsonl"))


class Trainer:
    """Writes two validations and ends as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **ends: int) -> None:
        self.ends, self.started = ends, list[str]()
        monkeypatch.setattr(study, "train", self)

    def __call__(self, plan: Run, folder: Path, place: Path) -> int:
        name = f"{plan.arm}{plan.seed}"
        self.started.append(name)
        place.mkdir(parents=True, exist_ok=True)
        if (status := self.ends.get(name, 0)) != 1:
            lines = [{"step": step, "val-core/t/acc/mean@1": 0.25 * (1 + step), "x": 1} for step in (0, 1)]
            (place / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return status


def test_a_study_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "s.jsonl"
    Trainer(monkeypatch, a2=143)
    with pytest.raises(KeyboardInterrupt):
        list(run_all(PLANS, results, tmp_path))
    with results.open("a") as file:
        file.write('{"arm": "a", "se')  # killed while it wrote
    again = Trainer(monkeypatch)
    list(run_all(missing(PLANS, read_runs(results)), results, tmp_path))
    assert again.started == ["a2", "b2"]
    assert [(run.arm, run.seed) for run in read_runs(results)] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert read_runs(results)[0].accuracies == [(0, 0.25), (1, 0.5)]
    assert missing(PLANS, read_runs(results)) == []


def test_a_run_that_did_not_start_is_no_result_but_a_fault_may_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "s.jsonl"
    Trainer(monkeypatch, a1=1)
    with pytest.raises(StudyError, match=r"^a, seed 1, ended before its first step; see .*output\.log\.$"):
        list(run_all(PLANS, results, tmp_path))
    assert not results.exists()
    (run,) = run_all([replace(PLANS[0], planted="shifted_mask")], results, tmp_path)
    assert (run.exit_status, run.curves) == (1, {})


@pytest.mark.parametrize(
    "changed", [{"overrides": ["x=c"]}, {"planted": "frozen"}, {"settings": {"NUM_HEADS": "6"}}]
)
def test_results_that_were_made_otherwise_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(StudyError, match="hold 'a', seed 1, run otherwise"):
        missing(PLANS, [replace(PLANS[0], **changed)])


def test_arms_are_recipes_with_variables_and_overrides() -> None:
    plans = plans_of_arms([f"none: {RECIPE} trainer.save_freq=-1", f"own: A=1 B=x=2 {RECIPE}"], [3, 4], {})
    assert plans[2] == Run("none", 4, ["trainer.save_freq=-1", "trainer.seed=4"], RECIPE)
    assert plans[1] == Run("own", 3, ["trainer.seed=3"], f"A=1 B=x=2 {RECIPE}")
    for wrong in ("none", "none:", "none: recipes/" + "ghost.sh", "none: A=1", f"A=1 {RECIPE}"):
        with pytest.raises(StudyError, match="an arm must be 'NAME:"):
            plans_of_arms([wrong], [1], {})


def test_long_runs_keep_all_validations_and_some_of_the_steps(tmp_path: Path) -> None:
    lines = [{"step": step, "critic/score/mean": 0.123456789, "other": 1.0} for step in range(600)]
    for line in lines[::50]:
        line["val-core/t/acc/mean@1"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    curves = curves_of(tmp_path)
    assert curves["critic/score/mean"] == [[step, 0.12346] for step in range(0, 600, 4)]
    assert [step for step, _ in curves["val-core/t/acc/mean@1"]] == list(range(0, 600, 50))
    assert "other" not in curves


def test_a_recipe_is_told_where_its_model_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", "m")
    monkeypatch.setenv("DATA_DIR", "d")
    commands = []

    def run(command: list[str], **named: Any) -> Namespace:
        commands.append((command, named["env"]))
        return Namespace(returncode=0)

    (plan,) = plans_of_arms([f"none: CORRECTION=disabled {RECIPE} trainer.save_freq=-1"], [3], {})
    with monkeypatch.context() as patched:
        patched.setattr(study.subprocess, "run", run)
        alone = replace(plan, recipe="", overrides=["task=digits", "hardware=cpu"])
        for one in (plan, alone, replace(alone, planted="frozen")):
            assert study.train(one, tmp_path, tmp_path / "run") == 0
    (recipe, environment), (plain, _), (faulty, _) = commands
    places = {name: environment[name] for name in ("MODEL_PATH", "DATA_DIR", "RUN_DIR")}
    assert recipe[:4] == ["env", "CORRECTION=disabled", "bash", RECIPE]
    arguments = arguments_of(ROOT / RECIPE, *recipe[4:], **places)
    assert load_run_config(arguments[2:]).trainer.default_local_dir == str(tmp_path / "run")
    assert load_run_config(plain[3:]).actor_rollout_ref.model.path == "m"
    assert faulty[2:5] == ["scripts.research.planted_faults", "--start", "frozen"]
    load_run_config(faulty[5:])


@pytest.mark.parametrize("results", [path for path in RESULTS if path.stem not in ("bill", "against_verl")])
def test_the_runs_that_are_kept_can_be_run_again(results: Path) -> None:
    runs = read_runs(results)
    assert missing(runs, runs) == []
    assert len({place_of(run, results, results.parent) for run in runs}) == len(runs)
    places = ["actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v"]
    tried = set[str]()
    for run in runs:
        chosen = {run.recipe, *run.overrides[:-1]}  # the last one is the seed
        if not chosen <= tried:
            load_run_config([*arguments_of_run(run), *places])
            tried |= chosen


def arguments_of_run(run: Run) -> list[str]:
    if not run.recipe:
        return run.overrides
    *variables, recipe = run.recipe.split()
    named = dict(variable.split("=", 1) for variable in variables)
    return arguments_of(ROOT / recipe, *run.overrides, **named)[2:]
