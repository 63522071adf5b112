"""The whole page as text. Data stand in one block of JSON; nothing is fetched, and the policy allows its own
scripts only."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from verl_rc import __version__
from verl_rc.insight.page.charts import PANELS, Chart, charts_of
from verl_rc.insight.page.encode import MOST_POINTS, Curve, curve_of, packed
from verl_rc.insight.page.fields import fields_panel
from verl_rc.insight.page.heat_map import heat_map_data
from verl_rc.insight.page.sparkline import sparkline
from verl_rc.insight.page.tables import (
    MOST_SAMPLES,
    alerts_panel,
    configuration_panel,
    evidence_panel,
    metrics_panel,
    samples_panel,
    sources_panel,
    verdict_panel,
)
from verl_rc.insight.page.text import escaped, section
from verl_rc.insight.page.tokens import MOST_TOKENS, tokens_panel
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.verdict import Verdict

_SCRIPTS = ("uPlot.iife.min.js", "report.js", "tokens.js")
_STYLES = ("uPlot.min.css", "report.css")
_MIB = 1 << 20


@dataclass(frozen=True)
class _Detail:
    """The amount of a run's data that a page holds."""

    points: int = MOST_POINTS
    samples: int = MOST_SAMPLES
    tokens: int = MOST_TOKENS
    metrics: bool = True
    with_text: bool = True


_DETAILS = (
    _Detail(),
    _Detail(samples=10, tokens=30_000),
    _Detail(samples=0, tokens=10_000),
    _Detail(300, 0, 0),
    _Detail(100, 0, 0, metrics=False),
)


def build_page(run: RunData, verdict: Verdict, with_text: bool = True, max_megabytes: float = 8.0) -> str:
    """The page of a run.

    Args:
        run: the run.
        verdict: its verdict.
        with_text: False: no prompts and responses.
        max_megabytes: samples and points of curves are left out until the page fits, where it can.
    """
    page = ""
    for number, detail in enumerate(_DETAILS):
        if not with_text:
            detail = replace(detail, samples=0, with_text=False)
        sentence = f"To fit {max_megabytes:g} MB the page leaves out {_left_out(detail)}."
        left_out = [sentence] if number else []
        page = _build(run, verdict, detail, left_out)
        if len(page.encode("utf-8", "replace")) <= max_megabytes * _MIB:
            break
    return page


def _left_out(detail: _Detail) -> str:
    parts = ["samples" if detail.samples == 0 else f"all but {detail.samples} samples"]
    if detail.tokens < MOST_TOKENS:
        parts.append(
            f"all but {detail.tokens:,} tokens of recorded rows" if detail.tokens else "rows of tokens"
        )
    if detail.points < MOST_POINTS:
        parts.append(f"points of curves beyond {detail.points}")
    if not detail.metrics:
        parts.append("the table of all metrics")
    return ", ".join(parts)


def _build(run: RunData, verdict: Verdict, detail: _Detail, left_out: Sequence[str]) -> str:
    data = _PageData(detail.points)
    panels = _panels(run, verdict, detail, data, left_out)
    title = f"{run.trainer} run {run.name}" if run.trainer else run.name
    links = "".join(f'<a href="#{name}">{escaped(heading)}</a>' for name, heading, _ in panels)
    content = "".join(section(name, heading, text) for name, heading, text in panels)
    scripts = "".join(f"<script>{asset(name)}</script>" for name in _SCRIPTS)
    digests = (hashlib.sha256(asset(name).encode("utf-8")).digest() for name in _SCRIPTS)
    sources = " ".join(f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta http-equiv="Content-Security-Policy" content="{policy}">'  # noqa: E501
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}: "
        f"report</title><style>{''.join(asset(name) for name in _STYLES)}</style></head>"
        f"<body><header><h1>{escaped(title)}</h1><p>{escaped(run.source)}, read by verl_rc "
        f"{escaped(__version__)}</p>"
        f"<nav>{links}</nav></header><main>{content}</main>"
        f'<script type="application/json" id="report-data">{as_script(data.as_json(run))}</script>{scripts}</body></html>\n'  # noqa: E501
    )


def _panels(
    run: RunData, verdict: Verdict, detail: _Detail, data: "_PageData", left_out: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Id, heading and content, from the top."""
    panels = [("verdict", "Verdict", verdict_panel(verdict))]
    for name, (heading, specs) in PANELS.items():
        figures = "".join(data.figure(chart) for chart in charts_of(specs, run))
        if name == "correction":
            figures = data.heat_figure(run) + figures
        if figures or name not in ("environment", "ledger"):
            content = (
                f'<div class="charts">{figures}</div>' if figures else "<p>Nothing was logged for this.</p>"
            )
            panels.append((name, heading, content))
    panels.append(("evidence", "Evidence", evidence_panel(run, verdict)))
    panels.append(("alerts", "Alerts", alerts_panel(run)))
    content, data.tokens = tokens_panel(run, detail.with_text, detail.tokens)
    panels.append(("tokens", "Tokens", content))
    if not run.is_own:
        panels.append(("fields", "What it recorded of tokens", fields_panel(run)))
    if run.is_own or run.samples:
        text = (
            samples_panel(run, detail.samples)
            if detail.samples > 0
            else "<p>Samples are left out of this page.</p>"
        )
        panels.append(("samples", "Samples", text))
    if run.is_own or run.settings:
        panels.append(("configuration", "Configuration", configuration_panel(run)))
    if detail.metrics:
        panels.append(("metrics", "All metrics", metrics_panel(run)))
    shows_samples = detail.samples > 0 and bool(run.samples)
    shows_text = shows_samples or bool(detail.with_text and run.tokens and run.tokens.pieces)
    panels.append(("sources", "Sources", sources_panel(run, shows_text, left_out)))
    return panels


class _PageData:
    """The numbers of the charts, as the script reads them."""

    def __init__(self, points: int) -> None:
        self._points = points
        self._steps: dict[str, int] = {}
        self._charts: list[dict[str, Any]] = []
        self._heat: dict[str, Any] | None = None
        self.tokens: dict[str, Any] | None = None

    def figure(self, chart: Chart) -> str:
        """Add the numbers of a chart; returns its figure on the page."""
        curves = [curve_of(line.series, line.low, line.high, self._points) for line in chart.lines]
        lines = [self._line(line.label, curve) for line, curve in zip(chart.lines, curves, strict=True)]
        number = len(self._charts)
        self._charts.append(
            {"title": chart.title, "stacked": chart.stacked, "healthy": chart.healthy, "lines": lines}
        )
        unit = f" <small>{escaped(chart.unit)}</small>" if chart.unit else ""
        return (
            f'<figure class="chart" id="chart-{number}" data-chart="{number}" tabindex="0">'
            f'<figcaption>{escaped(chart.title)}{unit}</figcaption><div class="plot">{sparkline(curves)}</div>'  # noqa: E501
            f'<details class="about"><summary>what this is</summary><p>{escaped(chart.about)}</p></details></figure>'  # noqa: E501
        )

    def heat_figure(self, run: RunData) -> str:
        """Add the heat map of log-ratios; returns its figure, or the key that records histograms; empty for
        other trainers."""
        if run.heat_map is None:
            if not run.is_own:
                return ""
            return (
                '<p class="missing">The heat map of log-ratios needs histograms: '
                "algorithm.rollout_correction.diagnostics=full records them.</p>"
            )
        self._heat = heat_map_data(run.heat_map, run.settings)
        return (
            '<figure class="heat" id="heat" tabindex="0"><figcaption>Log-ratios of all tokens <small>nats, '
            'log trainer over engine; stronger colour: more tokens</small></figcaption><div class="plot"></div></figure>'  # noqa: E501
        )

    def as_json(self, run: RunData) -> dict[str, Any]:
        """The data of the script."""
        alerts = [[alert.step, alert.title] for alert in run.alerts[-1_000:]]
        numbers = {"steps": list(self._steps), "charts": self._charts, "heat": self._heat}
        return {**numbers, "alerts": alerts, "tokens": self.tokens}

    def _line(self, label: str, curve: Curve) -> dict[str, Any]:
        steps = packed(curve.x)  # the page holds equal steps once
        line: dict[str, Any] = {
            "label": label,
            "x": self._steps.setdefault(steps, len(self._steps)),
            "y": packed(curve.y),
        }
        if curve.low is not None and curve.high is not None:
            line |= {"low": packed(curve.low), "high": packed(curve.high)}
        return line


def as_script(data: Any) -> str:
    """JSON for a script element: no character in it can end the element or begin another."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(name: str) -> str:
    """A file that is part of every page."""
    return resources.files("verl_rc.insight.page").joinpath("assets", name).read_text(encoding="utf-8")
