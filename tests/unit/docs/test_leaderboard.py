"""docs/leaderboard.md: its numbers are those of today's code, and what it tells people to type works."""

import re
import sys
from dataclasses import asdict

import pytest
from recipe_arguments import ROOT

from verl_rc.bench import flow, standing
from verl_rc.bench.method import find_method
from verl_rc.bench.policies import make_problem
from verl_rc.bench.results import read_results
from verl_rc.bench.standing import Result, known_methods
from verl_rc.cli import main

PAGE = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Add your method in ten minutes")[1].split("\n## ")[0]
KEPT = read_results(ROOT / "docs" / "bench" / "exact.json")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)


def test_every_method_stands_in_the_table():
    assert {method.name for method in known_methods()} == set(KEPT)
    table = PAGE.split("<!-- table of the exact track")[1].split("<!-- end of table -->")[0]
    rows = re.findall(r"^\| (\d+) \| `(.*?)` \| ([\d.]+) \|", table, re.MULTILINE)
    assert [name for _, name, _ in rows] == sorted(
        KEPT, key=lambda name: Result.from_json(name, KEPT[name]).error
    )
    places = [int(place) for place, _, _ in rows]
    assert places[0] == 1
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["disabled", "decoupled_seq_is", "loss_mode=m2po", "loss_mode=sapo"])
def test_kept_numbers_are_those_of_today(name):
    found = standing.run(find_method(name), with_flows=False)
    for condition, finding in found.findings.items():
        assert asdict(finding) == pytest.approx(KEPT[name]["findings"][condition], rel=1e-6, abs=1e-9), (
            condition
        )


def test_flows_that_were_kept_are_those_of_today(monkeypatch):
    monkeypatch.setattr(flow, "FLOW_CONDITIONS", {"frozen": flow.FLOW_CONDITIONS["frozen"]})
    found = flow.run_flow(find_method("decoupled_token_is"), standing.problems())["frozen"]
    assert asdict(found) == pytest.approx(KEPT["decoupled_token_is"]["flows"]["frozen"], rel=1e-5, abs=1e-8)


def test_a_newcomer_who_types_what_the_page_says_gets_a_table(tmp_path, monkeypatch, capsys):
    """The files of the section, then its commands, in a folder that has nothing else."""
    monkeypatch.setattr(standing, "known_methods", lambda: map(find_method, ["disabled", "bypass_ppo_clip"]))
    monkeypatch.setattr(standing, "problems", lambda: [make_problem(0)])
    monkeypatch.setattr(flow, "FLOW_CONDITIONS", {"fresh": flow.FLOW_CONDITIONS["fresh"]})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (code,), (keys,) = blocks("python"), blocks("yaml")
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "mine.yaml").write_text(keys)
    commands = [line.split() for block in blocks("bash") for line in block.splitlines()]
    named = re.search(r"A loss with options is `(.*?)`", SECTION)
    assert [command[:2] for command in commands] == [["verl-rc", "bench"]] * 3
    for method in [*(command[2] for command in commands), named[1]]:
        assert main(["bench", method]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{method}, exact track: ")
        assert re.search(r"^place \d of 3, mean error ", printed, re.MULTILINE)
