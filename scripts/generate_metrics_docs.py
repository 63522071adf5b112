"""Writes docs/metrics.md from the metric catalogue: python scripts/generate_metrics_docs.py"""

from __future__ import annotations

from pathlib import Path

from verl_rc.metrics.catalog import ROOMS
from verl_rc.metrics.catalog.spec import Bounds, MetricSpec

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"

_INTRODUCTION = """\
# Metrics

Every number that a run reports, with its unit and formula. `scripts/generate_metrics_docs.py` writes this page from
`verl_rc/metrics/catalog`; change an entry there.

`{data_source}` stands for the name of a data source, `{n}` for a number of samples, other names in braces for one word.
*Healthy* is where the number lies in most runs that go well; an empty cell means that no general statement is possible.
Unit `1`: a ratio, a fraction or a count.
"""


def render() -> str:
    """Returns the whole page."""
    parts = [_INTRODUCTION]
    for room, specs in ROOMS.items():
        parts.append(f"\n## {room}\n\n| Name | Unit | How it is computed | Healthy | Reported by |\n|---|---|---|---|---|\n")
        parts += [_row(spec) for spec in specs]
    return "".join(parts)


def _row(spec: MetricSpec) -> str:
    formula = spec.formula.replace("|", "\\|")
    return f"| `{spec.name}` | {spec.unit} | {formula} | {_range(spec.healthy)} | {spec.emitted_by} |\n"


def _range(bounds: Bounds | None) -> str:
    match bounds:
        case None:
            return ""
        case (None, high):
            return f"≤ {high:g}"
        case (low, None):
            return f"≥ {low:g}"
        case (low, high) if low == high:
            return f"{low:g}"
        case (low, high):
            return f"{low:g} to {high:g}"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
