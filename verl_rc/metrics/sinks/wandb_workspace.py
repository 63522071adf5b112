"""A saved view of a W&B project with the charts of ``PANELS``; a run never needs it."""

import re
from typing import Any

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces
from wandb.errors import Error

from verl_rc.metrics.panels import PANELS, Panel

NAME = "verl_rc"
VERDICT = "summary:verdict"
"""The column that every run has beside its name."""
_WORD = re.compile(r"\{\w+\}")


class WorkspaceError(ValueError):
    """W&B did not take the view; the message says why."""


def workspace(entity: str, project: str) -> workspaces.Workspace:
    """The view, as an object that nobody was told of yet."""
    sections = [
        workspaces.Section(
            name=name, panels=[_chart(panel) for panel in panels], is_open=place == 0, pinned=place == 0
        )
        for place, (name, panels) in enumerate(PANELS.items())
    ]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=sections,
        runset_settings=workspaces.RunsetSettings(pinned_columns=[VERDICT]),
    )


def workspace_json(entity: str, project: str) -> dict[str, Any]:
    """The view as W&B would store it."""
    view: dict[str, Any] = (
        workspace(entity, project)._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)
    )
    return view


def save_workspace(entity: str, project: str) -> str:
    """Save the view and return its address. Raises ``WorkspaceError``."""
    try:
        return str(workspace(entity, project).save().url)
    except (Error, OSError) as error:
        raise WorkspaceError(f"W&B did not save the view of {entity}/{project}: {error}") from error


def _chart(panel: Panel) -> reports.LinePlot:
    """A chart by names; by a pattern where a name has a word in braces."""
    if not any(_WORD.search(name) for name in panel.metrics):
        return reports.LinePlot(title=panel.title, y=list(panel.metrics))
    pattern = "|".join(".+".join(re.escape(part) for part in _WORD.split(name)) for name in panel.metrics)
    return reports.LinePlot(title=panel.title, metric_regex=f"^({pattern})$")
