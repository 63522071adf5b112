"""The saved view: built without a network, with every chart of the list and names of the catalogue."""

import json
import re
import sys
from typing import Any

import pytest

from verl_rc.cli import main
from verl_rc.metrics.catalog import CATALOG
from verl_rc.metrics.panels import PANELS


def test_every_chart_shows_metrics_of_the_catalogue() -> None:
    known = {spec.name for spec in CATALOG}
    names = [name for panels in PANELS.values() for panel in panels for name in panel.metrics]
    assert [name for name in names if name not in known and CATALOG.find(name) is None] == []
    assert [
        name for panels in PANELS.values() for panel in panels for name in [panel.title] if not panel.metrics
    ] == []


@pytest.mark.parametrize("project", ["project", "/project", "entity/", "a/b/c"])
def test_a_project_is_an_entity_and_a_name(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wandb-workspace", project]) == 2
    assert "ENTITY/PROJECT" in capsys.readouterr().err


def test_without_the_package_its_name_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "verl_rc.metrics.sinks.wandb_workspace", None)
    assert main(["wandb-workspace", "entity/project"]) == 2
    assert "pip install --editable '.[wandb-workspaces]'` in the clone" in capsys.readouterr().err


def view(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    pytest.importorskip("wandb_workspaces", reason="the extra wandb-workspaces is not installed")
    assert main(["wandb-workspace", "entity/project", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_view_has_the_sections_and_charts_of_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    found = view(capsys)
    assert (found["entity"], found["project"], found["displayName"]) == ("entity", "project", "verl_rc")
    sections = found["spec"]["section"]["panelBankConfig"]["sections"]
    assert [one["name"] for one in sections[: len(PANELS)]] == list(PANELS)
    for section, panels in zip(sections, PANELS.values(), strict=False):
        assert [chart["config"]["chartTitle"] for chart in section["panels"]] == [
            panel.title for panel in panels
        ]
        for chart, panel in zip(section["panels"], panels, strict=True):
            config = chart["config"]
            if any("{" in name for name in panel.metrics):
                assert config["useMetricRegex"]
                shown = [re.sub(r"\{\w+\}", "some_word", name) for name in panel.metrics]
                assert all(re.search(config["metricRegex"], name) for name in shown)
                assert not re.search(config["metricRegex"], "x" + shown[0])
            else:
                assert config["metrics"] == list(panel.metrics)
    assert sections[0]["isOpen"]
    assert "summary:verdict" in json.dumps(found)


def test_the_address_is_printed_and_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = pytest.importorskip(
        "wandb_workspaces.workspaces", reason="the extra wandb-workspaces is not installed"
    )
    errors = pytest.importorskip("wandb.errors")
    monkeypatch.setattr(package.Workspace, "save", lambda self: self)
    monkeypatch.setattr(package.Workspace, "url", property(lambda self: f"at {self.entity}/{self.project}"))
    assert main(["wandb-workspace", "entity/project"]) == 0
    assert capsys.readouterr().out == "at entity/project\n"

    def refuse(self: object) -> None:
        raise errors.CommError("no such project")

    monkeypatch.setattr(package.Workspace, "save", refuse)
    assert main(["wandb-workspace", "entity/project"]) == 2
    assert "W&B did not save the view of entity/project: no such project" in capsys.readouterr().err
