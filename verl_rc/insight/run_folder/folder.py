"""Reads a run's folder into ``RunData``: of finished, running, killed and resumed runs."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from verl_rc.config.files import RefusedFileError, open_inside
from verl_rc.config.plain_yaml import load_yaml
from verl_rc.config.schema import leaves_of, without_secrets
from verl_rc.insight.run_folder.foreign import RECORDINGS, read_foreign
from verl_rc.insight.run_folder.histograms import read_heat_map
from verl_rc.insight.run_folder.lines import (
    Record,
    first_and_newest,
    first_few,
    numbers_of,
    read_records,
    reading_notes,
)
from verl_rc.insight.run_folder.records import (
    LARGEST_STEP,
    OWN_RUN,
    Alert,
    Columns,
    Ending,
    NothingToReadError,
    ReplayedRecord,
    RunData,
    SavedSample,
)
from verl_rc.insight.run_folder.token_files import OWN_TRAINER, TokenSource, token_source
from verl_rc.insight.run_folder.tokens import read_tokens
from verl_rc.metrics.catalog import CATALOG
from verl_rc.metrics.run_files import ENDING

DIAGNOSIS = "diagnosis.json"
"""Written by ``verl-rc diagnose --replay``: its statements, and ``replayed``, what it measured of each
record."""
_METRICS, _CONFIG, _PLAN, _ALERTS = "metrics.jsonl", "resolved_config.yaml", "plan.txt", "alerts.jsonl"
_REPLACED = ".replaced.jsonl"
_TOTAL_STEPS = re.compile(r"^ *training steps: (\d+)", re.MULTILINE)
_MOST_SAMPLES = 20_000
_MOST_RUNS_NAMED = 8
_ALL_STEPS = range(LARGEST_STEP + 1)
_LARGEST_TEXT_FILE = 4 << 20
"""Bytes of a plan or a configuration that are read; longer files are not ours."""


def read_run(path: Path, first_step: int = 0, last_step: int = LARGEST_STEP) -> RunData:
    """Read a run's folder, or a log of another trainer: its steps from ``first_step`` to ``last_step``.

    Raises:
        NothingToReadError: there is nothing that a report could show, or no such step.
    """
    span = range(first_step, last_step + 1)
    try:
        run = _read(path, span)
    except OSError as error:
        raise NothingToReadError(f"{path} must be readable: {error.strerror or error}.") from error
    if not run.steps and not run.settings:
        reasons = " ".join(run.notes)
        raise NothingToReadError(
            f"{path} must hold at least one step or a configuration; it holds neither. {reasons}".rstrip()
        )
    return run if span == _ALL_STEPS else _cut(run, span)


def _read(path: Path, span: range) -> RunData:
    """The run; its token records and its heat map are those of ``span`` alone."""
    if not path.exists():
        raise NothingToReadError(f"{path} must be a run's folder or a log; there is no such file.")
    source = token_source(path)
    run = _own_run(path, source, span)
    if run is not None:
        return run
    run = read_foreign(path) if source is None or path.is_dir() else None
    if source is not None:
        return with_tokens(
            run or RunData(path.stem, path, f"{source.trainer or 'token'} records"), source, span
        )
    if run is not None:
        return _without_tokens(run)
    if path.is_dir() and (runs := sorted(file.parent.name for file in path.glob(f"*/{_METRICS}"))):
        names = first_few(runs, _MOST_RUNS_NAMED)
        raise NothingToReadError(f"{path} must be one run's folder; it is a folder of runs: {names}.")
    raise NothingToReadError(
        f"{path} must be a run's folder, token records or a log that is read here, and is none: have its "
        "trainer write token records (docs/token_record.md), or export its metrics from W&B as CSV or JSON."
    )


def _own_run(path: Path, source: TokenSource | None, span: range) -> RunData | None:
    """A run of verl_rc: its folder, or its metrics alone. None for the files of another trainer, which may
    have the same names."""
    has_settings = (path / _CONFIG).is_file()
    if has_settings or (path / _METRICS).is_file():
        run = _read_folder(path, source, span)
    elif path.suffix == ".jsonl" and source is None:
        run = _with_metrics(RunData(path.stem, path, OWN_RUN), path, None)
    else:
        return None
    known = sum(CATALOG.find(name) is not None for name in run.series)
    if not has_settings and 2 * known <= len(run.series):
        return None
    if source is not None and source.trainer not in ("", OWN_TRAINER):
        raise NothingToReadError(
            f"{path} must hold the files of one trainer; it holds a run of verl_rc and token records of "
            f"{source.trainer}. Pass a folder of one of them."
        )
    return run


def _without_tokens(run: RunData) -> RunData:
    """The run with a note that says how its trainer records tokens, where the trainer is known."""
    if run.trainer in RECORDINGS:
        run.notes.append(
            f"{run.trainer}'s log holds no log-probs of tokens, without which the cause of a gap cannot be "
            f"told. To record them: {RECORDINGS[run.trainer]}."
        )
    return run


def with_tokens(run: RunData, source: TokenSource, span: range = _ALL_STEPS) -> RunData:
    """A run of another trainer with its token records, and the metrics that its log lacks and they tell."""
    run.tokens = read_tokens(source, run.notes, span[0], span[-1])
    run.trainer = run.trainer or source.trainer
    if run.tokens is None:
        return run
    if not any("rollout_corr/kl" in metrics for metrics in run.tokens.metrics.values()):
        run.notes.append(
            "The token records hold no log-probs of the trainer, without which the gap cannot be told."
        )
    columns = Columns(run.tokens.metrics.items())
    run.series = {**columns.series(), **run.series}
    run.steps = sorted({*run.steps, *columns.steps})
    return run


def _read_folder(folder: Path, source: TokenSource | None, span: range) -> RunData:
    run = RunData(folder.resolve().name, folder, OWN_RUN)
    run.settings = _parsed(folder / _CONFIG, run.notes, _settings, {})
    run.plan = _text(folder / _PLAN, run.notes)
    run.total_steps = _total_steps(run)
    run = _with_metrics(run, folder / _METRICS, folder)
    run.alerts = [
        _alert(step, record)
        for step, record in read_records(folder / _ALERTS, run.notes, folder=folder)
        if {"title", "text"} <= record.keys()
    ]
    run.samples = _samples(folder, run.notes)
    run.heat_map = read_heat_map(
        read_records(folder / "histograms.jsonl", run.notes, max_complaints=1, folder=folder), run.notes, span
    )
    run.tokens = None if source is None else read_tokens(source, run.notes, span[0], span[-1])
    run.ending = _parsed(folder / ENDING, run.notes, TypeAdapter(Ending).validate_json, None)
    run.replays = read_replays(folder, run.notes)
    if (folder / _METRICS.replace(".jsonl", _REPLACED)).is_file():
        run.notes.append(
            "The run was resumed: lines of steps that it did again are in metrics.replaced.jsonl, not here."
        )
    return run


def _alert(step: int, record: Record) -> Alert:
    """An alert without the damaged parts of its evidence."""
    title, text, cause = (str(record.get(name, "")) for name in ("title", "text", "cause"))
    return Alert(step, title, text, cause, numbers_of(record.get("evidence")))


def _with_metrics(run: RunData, path: Path, folder: Path | None) -> RunData:
    if not path.is_file():
        run.notes.append(f"{path.name} is not there: no step was logged.")
    records = read_records(path, run.notes, folder=folder)
    columns = Columns((step, numbers_of(record)) for step, record in records)
    run.steps, run.series = columns.steps, columns.series()
    run.notes.extend(reading_notes(columns))
    return run


def _samples(folder: Path, notes: list[str]) -> list[SavedSample]:
    """Rows of the table of validation samples."""
    tables = sorted((folder / "tables").glob("*.jsonl"))
    samples = (
        SavedSample(step, cells)
        for path in tables
        if not path.name.endswith(_REPLACED)
        for step, cells in read_records(path, notes, folder=folder)
    )
    return first_and_newest(samples, _MOST_SAMPLES, notes)


def _text(path: Path, notes: list[str]) -> str | None:
    """The text of a file of a run's folder; None where there is none that can be read."""
    if not path.is_file():
        return None
    try:
        with open_inside(path.parent, path) as file:
            text = file.read(_LARGEST_TEXT_FILE + 1)
    except RefusedFileError as error:
        notes.append(f"{path.name} is left out: {error.strerror}.")
        return None
    if len(text) > _LARGEST_TEXT_FILE:
        notes.append(f"{path.name} has more than {_LARGEST_TEXT_FILE >> 20} MiB and is left out.")
        return None
    return text.decode("utf-8", "replace")


def _parsed(path: Path, notes: list[str], parse: Callable[[str], Any], otherwise: Any) -> Any:
    """The parsed text of a file; ``otherwise`` where there is no file, or where ``parse`` raises."""
    text = _text(path, notes)
    if text is None:
        return otherwise
    try:
        return parse(text)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read and is left out: {' '.join(str(error).split())[:200]}.")
        return otherwise


def _settings(text: str) -> dict[str, Any]:
    """The configuration by dotted key, without secrets."""
    tree = load_yaml(text)
    if not isinstance(tree, dict):
        raise TypeError("it must be a mapping")
    return dict(leaves_of(without_secrets(tree)))


def read_replays(folder: Path, notes: list[str]) -> list[ReplayedRecord]:
    """Measurements of ``verl-rc diagnose --replay``, of all steps; empty where it has not been called."""
    kind = TypeAdapter(list[ReplayedRecord])
    return _parsed(  # type: ignore[no-any-return]
        folder / DIAGNOSIS, notes, lambda text: kind.validate_python(json.loads(text)["replayed"]), []
    )


def _total_steps(run: RunData) -> int | None:
    if run.plan is not None and (match := _TOTAL_STEPS.search(run.plan)):
        return int(match[1])
    setting = run.settings.get("trainer.total_training_steps")
    return setting if isinstance(setting, int) else None


def _cut(run: RunData, span: range) -> RunData:
    """The run as if it had logged the steps of ``span`` alone. Its ending belongs to its last step."""
    steps = [step for step in run.steps if step in span]
    readable = steps or (run.tokens.steps if run.tokens is not None else ())  # a step may have records alone
    if not readable:
        logged = f"steps {run.steps[0]} to {run.steps[-1]}" if run.steps else "none"
        raise NothingToReadError(
            f"{run.path} must hold a step from {span[0]} to {span[-1]}; it has {logged}."
        )
    has_last_step = bool(steps) and run.steps[-1] in span
    series = {name: series.between(span[0], span[-1]) for name, series in run.series.items()}
    return replace(
        run,
        steps=steps,
        series={name: part for name, part in series.items() if len(part)},
        _finite={},
        alerts=[alert for alert in run.alerts if alert.step in span],
        samples=[sample for sample in run.samples if sample.step in span],
        replays=[record for record in run.replays if record.step in span],
        total_steps=run.total_steps if has_last_step else None,
        ending=run.ending if has_last_step else None,
        notes=[*run.notes, f"Only steps {readable[0]} to {readable[-1]} are shown."],
    )
