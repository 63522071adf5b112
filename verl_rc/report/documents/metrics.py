"""docs/metrics.md, from the metric catalogue."""

from verl_rc.metrics.catalog import SECTIONS
from verl_rc.metrics.catalog.spec import MetricSpec

_HEAD = """\
# Metrics

Every number that a run reports, with its unit and formula. `verl-rc docs` writes this page from
`verl_rc/metrics/catalog`; change an entry there.

`{data_source}` stands for the name of a data source, `{n}` for a number of samples, other names in
braces for one word. *Healthy* is where the number lies in most runs that go well; an empty cell
means that no general statement is possible. Unit `1`: a ratio, a fraction or a count. Formulas are
tested by worked values: `tests/unit/metrics/catalog/test_worked_values.py`.
"""


def render() -> str:
    """The whole page."""
    parts = [_HEAD]
    for section, specs in SECTIONS.items():
        parts.append(f"\n## {section}\n\n| Name | Unit | How it is computed | Healthy | Reported by |\n|---|---|---|---|---|\n")
        parts += [_row(spec) for spec in specs]
    return "".join(parts)


def _row(spec: MetricSpec) -> str:
    formula = spec.formula.replace("|", "\\|")
    return f"| `{spec.name}` | {spec.unit} | {formula} | {spec.healthy_in_words} | {spec.emitted_by} |\n"
