"""A method beside the others: places, ties, and what is kept."""

import json
import subprocess
import sys

import pytest

from verl_rc.bench import flow, results, standing
from verl_rc.bench.exact import Finding
from verl_rc.bench.flow import Flow
from verl_rc.bench.method import find_method
from verl_rc.bench.policies import make_problem
from verl_rc.bench.results import read_results, record_results
from verl_rc.bench.standing import Result, Standing, known_methods, stand
from verl_rc.cli import main
from verl_rc.config.algorithms import LOSS_MODES
from verl_rc.config.rollout_correction import PRESETS


def result(name: str, *errors: float) -> Result:
    findings = {str(place): Finding(0.1, 2.0, 0.9, 0.5, error) for place, error in enumerate(errors)}
    return Result(name, 1, findings, {"fresh": Flow(0.5, 0.7, 0.0, 1.0)})


def test_every_preset_and_every_loss_takes_part_once():
    methods = list(known_methods())
    named = [method.name for method in methods]
    assert len(named) == len(set(named))
    tried = [(method.correction, method.loss) for method in methods]
    for name in PRESETS:
        method = find_method(name)
        assert tried.count((method.correction, method.loss)) == 1, name
    assert {method.loss for method in methods} == {*LOSS_MODES, "reinforce"}


def test_places_count_the_better_ones_and_equal_ones_share_theirs():
    others = [result("first", 0.1, 0.3), result("second", 0.3, 0.3), result("like", 0.4, 0.4003)]
    lines = Standing(result("mine", 0.5, 0.3), {}, [*others, result("last", 0.9, 0.9)]).lines()
    assert lines[-1] == "place 3 of 5, mean error 0.400, behind second, beside like"
    flow = "100 steps, fresh: expected score 0.500 at the end, above 0.95 in 0% of the policies, collapsed in"
    assert f"{flow} 100%" in lines
    assert Standing(others[0], {}, others[1:]).lines()[-1] == "place 1 of 3, mean error 0.200"


def test_the_table_compares_errors_with_the_references():
    lines = Standing(result("mine", 0.5), {"none": result("none", 0.1)}, []).lines()
    assert lines[5].split() == ["condition", "bias", "variance", "cosine", "error", "unscaled", "of", "none"]
    assert lines[6].split() == ["0", "0.100", "2.000", "0.900", "0.500", "0.500", "1.000"]


def test_a_result_survives_its_json():
    kept = result("mine", 0.5, 0.2)
    assert Result.from_json("mine", json.loads(json.dumps(kept.as_json()))) == kept


def test_results_are_kept_by_method_and_conditions_are_never_mixed(tmp_path, monkeypatch):
    file = record_results(tmp_path / "kept", {"one": result("one", 0.5)})
    record_results(tmp_path / "kept", {"two": result("two", 0.4)})
    record_results(tmp_path / "kept", {"one": result("one", 0.3)})
    known = read_results(file)
    assert list(known) == ["one", "two"]
    assert Result.from_json("one", known["one"]) == result("one", 0.3)
    assert known["two"]["versions"]["torch"]
    assert " with " in known["two"]["machine"]
    assert len(known["two"]["commit"]) == 40
    before = file.read_text()
    monkeypatch.setattr(standing.exact, "NOISE", 0.5)
    with pytest.raises(
        ValueError, match=r"exact.json must hold results of today's conditions; exact.NOISE differ"
    ):
        record_results(tmp_path / "kept", {"three": result("three", 0.1)})
    assert file.read_text() == before


@pytest.fixture
def _short(monkeypatch):
    """Two other methods, one policy, one flow."""
    monkeypatch.setattr(standing, "known_methods", lambda: map(find_method, ["disabled", "bypass_ppo_clip"]))
    monkeypatch.setattr(standing, "problems", lambda: [make_problem(2)])
    monkeypatch.setattr(flow, "FLOW_CONDITIONS", {"fresh": flow.FLOW_CONDITIONS["fresh"]})
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("_short")
def test_sequence_weights_stand_before_no_correction_and_the_clip_behind():
    found = stand(find_method("decoupled_seq_is"))
    assert [other.name for other in found.others] == ["disabled", "bypass_ppo_clip"]
    assert found.lines()[-1].startswith("place 1 of 3, ")
    assert (found.result.forwards, found.others[1].forwards) == (1, 0)
    assert found.others[1].worst == "8 steps"


def test_a_package_below_the_checkout_of_another_project_is_at_no_commit(tmp_path, monkeypatch):
    assert len(results.commit()) == 40
    git = ["git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@here"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=first"], check=True)
    monkeypatch.setattr(results, "__file__", str(tmp_path / "venv" / "verl_rc" / "bench" / "results.py"))
    (tmp_path / "venv").mkdir()
    assert results.commit() is None


@pytest.mark.usefixtures("_short")
def test_the_command_prints_a_table_and_saves(tmp_path, capsys, monkeypatch):
    (tmp_path / "of_my_own.py").write_text(
        "def weights(train_log_probs, rollout_log_probs):\n"
        "    return (train_log_probs - rollout_log_probs).exp().clamp(max=2)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "of_my_own:weights", "--save", "kept"]) == 0
    printed = capsys.readouterr().out
    assert "100 steps, fresh: expected score 0.99" in printed
    assert "\nplace 1 of 3, " in printed
    assert "of_my_own:weights" in read_results(tmp_path / "kept/exact.json")
    assert main(["bench", "decoupled_token_is", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]["4 steps"]
    kept = read_results(tmp_path / "kept/exact.json")["of_my_own:weights"]["findings"]["4 steps"]
    assert found == pytest.approx(kept)


@pytest.mark.usefixtures("_short")
def test_all_methods_are_kept_one_by_one(tmp_path, capsys):
    assert main(["bench", "all", "--save", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == ["disabled", "bypass_ppo_clip"]
    assert list(read_results(tmp_path / "exact.json")) == ["bypass_ppo_clip", "disabled"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["decoupled_sec_is"], "did you mean decoupled_seq_is?"),
        (["no.yaml"], "No such file or directory: 'no.yaml'"),
        (["all"], "say with --save where results are kept"),
        (
            ["loss_mode=dro"],
            "the loss 'dro' needs actor_rollout_ref.actor.policy_loss.dro_beta > 0",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, named, capsys):
    assert main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verl-rc bench: ")
    assert named in line
