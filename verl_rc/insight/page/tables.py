"""Panels that are tables: verdict, evidence, alerts, samples, all metrics, configuration, what was read."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of
from verl_rc.insight.page.encode import curve_of
from verl_rc.insight.page.sparkline import sparkline
from verl_rc.insight.page.text import escaped, listed, number, shortened, table
from verl_rc.insight.run_folder import RunData, SavedSample
from verl_rc.insight.verdict import Statement, Verdict
from verl_rc.insight.verdict.estimates import last_tenth, mean_of
from verl_rc.metrics.catalog import CATALOG

PANEL_OF_TOPIC = {"learning": "learning", "gap": "correction", "correction": "correction", "speed": "time"}
_MARKS = {"fault": "✗ wrong", "notice": "! look", "good": "✓ fine", "unknown": "? unknown"}
MOST_ALERTS = 200
MOST_SAMPLES = 60
_MOST_PROMPTS = 20
_MOST_SETTINGS = 2_000


def verdict_panel(verdict: Verdict) -> str:
    """Headline, statements and what to do first."""
    items = "".join(_statement(statement) for statement in verdict.statements)
    overrides = escaped("\n".join(verdict.do_first))
    first = f"<h3>Do this first</h3><pre>{overrides}</pre>" if overrides else ""
    return (
        f'<p class="headline {verdict.level}">{escaped(verdict.headline)}</p><p>{escaped(verdict.progress)}</p>'  # noqa: E501
        f'<ul class="verdict">{items}</ul>{first}'
    )


def _statement(statement: Statement) -> str:
    test = f'<br><span class="next">{escaped(statement.next_test)}</span>' if statement.next_test else ""
    return (
        f'<li class="{statement.level}"><span class="mark">{_MARKS[statement.level]}</span> '
        f'<a href="#{PANEL_OF_TOPIC[statement.topic]}">{statement.topic}</a>: {escaped(statement.text)}{test}</li>'  # noqa: E501
    )


def evidence_panel(run: RunData, verdict: Verdict) -> str:
    """The statements with their numbers, replays if any were made, and what the rules looked at."""
    rows = [
        (
            escaped(statement.topic),
            escaped(statement.cause),
            escaped(statement.confidence or statement.level),
            _evidence(statement.evidence),
            escaped(statement.step_range),
            escaped(statement.next_test),
        )
        for statement in verdict.statements
    ]
    evidence = table(("topic", "cause", "confidence", "evidence", "steps", "next test"), rows)
    checked = "<p>The rules for the gap have checked:</p>" + listed(verdict.checked)
    if verdict.unasked:
        checked += "<p>They could not check:</p>" + listed(verdict.unasked)
    invisible = f"<p>What metrics alone cannot show: {escaped(verdict.not_visible)}.</p>"
    return f"{evidence}{checked}{invisible}{_replays(run)}"


def _replays(run: RunData) -> str:
    """The measurements of each replayed record, in nats."""
    if not run.replays:
        return (
            "<p>Replays of recorded tokens tell more: <code>verl-rc diagnose RUN --replay</code></p>"
            if run.is_own and run.tokens is not None
            else ""
        )
    rows = [
        (
            str(record.step),
            str(record.version),
            number(record.gap),
            f"{number(record.trainer)} ({record.share:.0%})",
            str(record.best_version) if record.versions else "",
        )
        for record in run.replays
    ]
    head = ("step", "reported weights", "gap, nats", "trainer, recorded and again", "nearest weights")
    return f"<h3>Replays</h3>{table(head, rows)}"


def alerts_panel(run: RunData) -> str:
    """The newest alerts of a run."""
    if not run.alerts:
        return "<p>No alert.</p>"
    alerts = list(run.alerts)[-MOST_ALERTS:]
    cut = f"<p>The last {len(alerts)} of {len(run.alerts):,}.</p>" if len(alerts) < len(run.alerts) else ""
    rows = [
        (
            str(alert.step),
            escaped(alert.title),
            shortened(alert.text, 500),
            escaped(alert.cause),
            _evidence(alert.evidence),
        )
        for alert in reversed(alerts)
    ]
    head = ("step", "alert", "text", "cause", "evidence")
    causes = any(alert.cause for alert in alerts)
    return cut + table(head if causes else head[:3], rows if causes else [row[:3] for row in rows])


def _evidence(numbers: Mapping[str, float]) -> str:
    return escaped(", ".join(f"{name} {number(value)}" for name, value in numbers.items()))


def samples_panel(run: RunData, most: int = MOST_SAMPLES) -> str:
    """Samples of the last step that has any, worst and best first, and the same prompts at the first."""
    if not run.samples:
        return (
            "<p>No samples were recorded; trainer.log_val_generations=8 records some of every validation.</p>"
        )
    samples = select_samples(run.samples, most)
    columns = list(dict.fromkeys(name for sample in samples for name in sample.cells))
    rows = [
        (str(sample.step), *(f"<bdi>{shortened(sample.cells.get(name, ''))}</bdi>" for name in columns))
        for sample in samples
    ]
    changes = _changes(run.samples)
    caption = (
        f"<p>{len(samples)} of {len(run.samples):,} recorded samples: the newest step from both ends, then "
        "the first.</p>"
    )
    return caption + table(("step", *map(escaped, columns)), rows, "samples") + changes


def _changes(samples: Sequence[SavedSample]) -> str:
    """The answers to one prompt at the first and at the last step that has them; nothing where no prompt
    comes twice."""
    by_prompt: dict[str, list[SavedSample]] = {}
    for sample in samples:
        if "input" in sample.cells and "output" in sample.cells:
            by_prompt.setdefault(str(sample.cells["input"]), []).append(sample)
    pairs = [
        (samples_of_prompt[0], samples_of_prompt[-1])
        for samples_of_prompt in by_prompt.values()
        if samples_of_prompt[0].step != samples_of_prompt[-1].step
    ]
    if not pairs:
        return ""
    rows = [
        tuple(
            f"<bdi>{shortened(value, 500)}</bdi>"
            for value in (first.cells["input"], *_answer(first), *_answer(last))
        )
        for first, last in pairs[:_MOST_PROMPTS]
    ]
    head = (
        "prompt",
        f"answer at step {pairs[0][0].step}",
        "score",
        f"answer at step {pairs[0][1].step}",
        "score",
    )
    return "<h3>The same prompts, first and last</h3>" + table(head, rows, "samples")


def _answer(sample: SavedSample) -> tuple[Any, Any]:
    return sample.cells["output"], sample.cells.get("score", "")


def select_samples(samples: Sequence[SavedSample], most: int) -> list[SavedSample]:
    """Two thirds of ``most`` from the newest step, from both ends of the scores; the others from the first
    step."""
    newest, oldest = samples[-1].step, samples[0].step
    newest_samples = _from_both_ends([sample for sample in samples if sample.step == newest])
    oldest_samples = [sample for sample in samples if sample.step == oldest] if oldest != newest else []
    selection = newest_samples[: most - min(len(oldest_samples), most // 3)]
    return selection + oldest_samples[: most - len(selection)]


def _from_both_ends(samples: Sequence[SavedSample]) -> list[SavedSample]:
    """Worst, best, second worst, second best, …"""

    def score(sample: SavedSample) -> float:
        value = sample.cells.get("score")
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else -math.inf

    ordered = sorted(samples, key=score)
    return [ordered[i // 2] if i % 2 == 0 else ordered[-1 - i // 2] for i in range(len(ordered))]


def metrics_panel(run: RunData) -> str:
    """Every metric that was logged, charted or not."""
    rows = []
    for name in sorted(run.series):
        finite, entry = run.get(name), CATALOG.find(name)
        last = mean_of(last_tenth(finite))
        healthy = "" if entry is None else entry.healthy_in_words
        left_out = len(run.series[name]) - len(finite)
        rows.append(
            (
                f'<span title="{escaped("" if entry is None else entry.formula)}">{escaped(name)}</span>',
                *([escaped(run.their_names.get(name, ""))] if run.their_names else []),
                "not in the catalogue" if entry is None else escaped("" if entry.unit == "1" else entry.unit),
                number(finite.values[0]) if len(finite) else "",
                number(finite.values[-1]) if len(finite) else "",
                ""
                if last is None
                else number(last.value) + (f" ± {number(last.error)}" if last.interval else ""),
                number(min(finite.values)) if len(finite) else "",
                number(max(finite.values)) if len(finite) else "",
                escaped(healthy),
                f"{left_out}" if left_out else "",
                sparkline([curve_of(run.series[name], most_points=60)]),
            )
        )
    head = (
        "metric",
        *([f"in {escaped(run.trainer or 'its trainer')}"] if run.their_names else []),
        "unit",
        "first",
        "last",
        "last tenth",
        "smallest",
        "largest",
        "healthy",
        "not finite",
        "",
    )
    return f"<details><summary>{len(rows)} metrics</summary>{table(head, rows, 'metrics')}</details>"


def configuration_panel(run: RunData) -> str:
    """Keys that differ from their defaults, all keys, and the plan."""
    if not run.settings:
        return "<p>The configuration is not known; a run of verl_rc writes resolved_config.yaml.</p>"
    defaults = {key: field.default for key, field in fields_of(RunConfig).items() if not field.is_required()}
    settings = [
        (key, value) for key, value in run.settings.items() if key not in defaults or defaults[key] != value
    ]
    rows = [
        (escaped(key), shortened(value, 300), shortened(defaults.get(key, "required"), 300))
        for key, value in settings
    ]
    all_rows = [
        (escaped(key), shortened(value, 300)) for key, value in list(run.settings.items())[:_MOST_SETTINGS]
    ]
    plan = f"<details><summary>plan.txt</summary><pre>{escaped(run.plan)}</pre></details>" if run.plan else ""
    return (
        f"<p>{len(settings)} of {len(run.settings):,} keys differ from their defaults.</p>"
        f"{table(('key', 'value', 'default'), rows)}"
        f"<details><summary>all keys</summary>{table(('key', 'value'), all_rows)}</details>{plan}"
    )


def sources_panel(run: RunData, has_text: bool, left_out: Sequence[str]) -> str:
    """Notes of the readers, what the page leaves out, and whether it holds texts of prompts and responses."""
    text = (
        "This page holds texts of prompts and responses."
        if has_text
        else "This page holds no text of prompts or responses."
    )
    return listed([*run.notes, *left_out, text]) + _traces(run)


def _traces(run: RunData) -> str:
    """Links to the traces of profiled steps; empty without any."""
    elsewhere = run.settings.get("global_profiler.save_path")
    if elsewhere and run.settings.get("global_profiler.tool"):
        return f"<p>Traces of profiled steps are in {escaped(elsewhere)}.</p>"
    names = sorted(path.name for path in (run.path / "profile").glob("*.json.gz"))
    links = " ".join(f'<a href="profile/{quote(name)}">{escaped(name)}</a>' for name in names)
    return f"<p>Traces of profiled steps, for https://ui.perfetto.dev: {links}</p>" if names else ""
