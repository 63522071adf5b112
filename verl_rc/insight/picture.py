"""Plotting a run's accuracy, reward, ESS and gap over its steps."""

import io
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_rc.config.files import whole_or_absent
from verl_rc.insight.run_folder import RunData, Series, read_run
from verl_rc.insight.verdict.estimates import running_mean
from verl_rc.insight.verdict.learning import headline_validation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "training_curves.png"
_SCORE = "critic/score/mean"
_ESS = "rollout_corr/rollout_is_eff_sample_size"
_GAP = "sync/rollout_gap_mean"

COLOURS = ("#3b8ad8", "#e07b39", "#2fa36b", "#b565c7", "#c9a227", "#d9534f")
_GREY = "#808080"
"""A colour that is legible on white and on black; the picture has a transparent background."""
_STYLE: dict[str, Any] = {
    "font.size": 10.5,
    "text.color": _GREY,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.titlecolor": _GREY,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GREY,
    "grid.alpha": 0.25,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
}
_SMOOTHED_SHARE = 15
"""The running mean of a panel covers one fifteenth of the run's steps."""
_MAX_NAMED_SOURCES = 6


def draw_run(path: Path) -> Path:
    """Write the picture of the run at ``path`` into its folder, or beside its log; returns its path.

    Raises ``ValueError`` when there is nothing to draw, and ``OSError`` when the picture cannot be written.
    """
    run = read_run(path)
    if not run.steps:
        raise ValueError(f"{path} must hold at least one step; the run has logged none yet.")
    folder = path if path.is_dir() else path.parent
    return write_picture(folder / PICTURE, (9.6, 5.8), partial(_draw, run=run))


def write_picture(path: Path, inches: tuple[float, float], draw: "Callable[[Figure], None]") -> Path:
    """Write the figure of this size that ``draw`` fills; returns ``path``. No display is needed."""
    # Its remarks on folders and fonts change nothing in the picture.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib  # noqa: PLC0415  (a second, for which no run should wait before its end)
    from matplotlib.figure import Figure  # noqa: PLC0415  (as above)

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=140, transparent=True)  # Figure alone draws with Agg
    with whole_or_absent(path) as file:
        file.write(buffer.getvalue())
    return path


def _draw(figure: "Figure", run: RunData) -> None:
    ((accuracy, reward), (ess, gap)) = figure.subplots(2, 2, sharex=True)
    _draw_validation(accuracy, headline_validation(run))
    _draw_metric(reward, run.get(_SCORE), "Reward of the training samples", "mean score")
    if handles := reward.get_legend_handles_labels()[0]:
        reward.legend(handles=handles, loc="lower right")
    _draw_metric(ess, run.get(_ESS), "Effective sample size (ESS)", "share of the batch")
    ess.set_ylim(0, 1.03)
    _draw_metric(gap, run.get(_GAP), "Gap between engine and trainer", "mean |log-ratio| (nats per token)")
    gap.set_ylim(bottom=0)
    for panel in (ess, gap):
        panel.set_xlabel("training step")
        panel.xaxis.get_major_locator().set_params(integer=True)


def _draw_validation(panel: "Axes", validation: Mapping[tuple[str, str], Series]) -> None:
    variables = {variable for _, variable in validation}
    quantity = (
        "Reward" if variables == {"reward"} else "Accuracy" if variables <= {"acc"} else "Accuracy or reward"
    )
    panel.set_title(f"{quantity} on validation prompts")
    panel.set_ylabel("share of right answers" if quantity == "Accuracy" else "mean")
    if not validation:
        _write_no_data(panel)
    for index, ((source, _), series) in enumerate(sorted(validation.items())):
        colour = COLOURS[index % len(COLOURS)]
        panel.plot(series.steps, series.values, color=colour, marker="o", markersize=5, label=source)
        if len(validation) == 1 and len(series):
            _write_value(panel, series.steps[0], series.values[0], is_below=True)
            _write_value(panel, series.steps[-1], series.values[-1])
    if quantity == "Accuracy":
        panel.set_ylim(0, 1.03)
    if len(validation) > 1:
        handles, labels = panel.get_legend_handles_labels()
        panel.legend(handles[:_MAX_NAMED_SOURCES], labels[:_MAX_NAMED_SOURCES])


def _draw_metric(panel: "Axes", series: Series, title: str, unit: str) -> None:
    """Plot every step in a light colour, and the running mean with its last value."""
    panel.set_title(title)
    panel.set_ylabel(unit)
    if not len(series):
        _write_no_data(panel)
        return
    width = max(1, len(series.steps) // _SMOOTHED_SHARE)
    means = running_mean(series.values, width)
    if width > 1:
        panel.plot(series.steps, series.values, color=COLOURS[0], alpha=0.4, linewidth=1)
    label = f"mean of {width} steps" if width > 1 else "each step"
    panel.plot(
        series.steps, means, color=COLOURS[0], linewidth=2, marker="o" if width == 1 else None, label=label
    )
    _write_value(panel, series.steps[-1], means[-1])


def _write_value(panel: "Axes", step: int, value: float, is_below: bool = False) -> None:
    """Write a number to the right of a point, or to its lower right."""
    offset, vertical = ((6, -4), "top") if is_below else ((7, 0), "center")
    panel.annotate(
        f"{value:.3g}",
        (step, value),
        xytext=offset,
        textcoords="offset points",
        va=vertical,
        fontweight="bold",
        annotation_clip=False,
    )


def _write_no_data(panel: "Axes") -> None:
    panel.text(
        0.5,
        0.5,
        "not measured in this run",
        transform=panel.transAxes,
        ha="center",
        va="center",
        style="italic",
    )
