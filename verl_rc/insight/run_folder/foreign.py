"""Logs of other trainers: verl's file logger, its console lines and rollout dumps; TRL's state; W&B's exports
of any trainer.

Names are mapped onto the catalogue where the meaning is equal, and nowhere else.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from verl_rc.insight.run_folder import exports, trl
from verl_rc.insight.run_folder.lines import (
    as_number,
    as_step,
    first_and_newest,
    lines_of,
    numbers_of,
    open_text,
    read_records,
    reading_notes,
)
from verl_rc.insight.run_folder.records import Columns, RunData, SavedSample
from verl_rc.insight.run_folder.token_files import read_lines
from verl_rc.records.token_records.token_rows import parse_line

FILE_LOGGER, CONSOLE, DUMPS = "verl's file logger", "verl's console log", "verl's rollout dumps"

RECORDINGS: Mapping[str, str] = {
    "TRL": "from verl_rc.insight.hooks.trl import record_tokens; record_tokens(trainer)",
    "verl": "VERL_RC_TOKENS=FOLDER in the environment, actor_rollout_ref.rollout.calculate_log_probs=True",
}
"""The options with which a trainer records its tokens, word for word, by the trainer's name."""

_EQUAL_NAMES = {
    "mismatch/mismatch_kl": "rollout_corr/kl",  # verl, October 2025: docs/rollout_correction.md
    "mismatch/mismatch_k3_kl": "rollout_corr/k3_kl",
    "mismatch/rollout_is_mean": "rollout_corr/rollout_is_raw_mean",  # before truncation then
    "mismatch/rollout_is_clipped_fraction": "rollout_corr/rollout_is_oob_ratio",
    "mismatch/rollout_is_masked_fraction": "rollout_corr/rollout_rs_masked_fraction",
    "mismatch/rollout_is_seq_masked_fraction": "rollout_corr/rollout_rs_seq_masked_fraction",
    # TRL, GRPOTrainer: mean |trainer - vLLM log-prob|
    "sampling/sampling_logp_difference/mean": "sync/rollout_gap_mean",
    "sampling/sampling_logp_difference/max": "sync/rollout_gap_max",
}
_EQUAL_BEGINNINGS = (
    ("actor/rollout_corr/", "rollout_corr/"),  # verl's bypass mode
    ("mismatch/mismatch_", "rollout_corr/"),
    ("mismatch/rollout_is_", "rollout_corr/rollout_is_"),
)
_REJECTED = ("rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_seq_masked_fraction")

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONSOLE_LINE = re.compile(r"(?:^|[\s\r])step:(\d+) - (.+)$")
_NUMBER = re.compile(r"(?:np\.\w+\()?([-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf))\)?(?=\s|$)")
_SNIFFED = 8192
_MOST_DUMPED_SAMPLES = 2_000


def catalogue_name(name: str) -> str:
    """The catalogue's name of a metric of another trainer; the name itself where none is known to mean the
    same."""
    bare = name.removeprefix("train/")  # TRL's section at W&B
    if bare in _EQUAL_NAMES:
        return _EQUAL_NAMES[bare]
    for theirs, ours in _EQUAL_BEGINNINGS:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def read_foreign(path: Path) -> RunData | None:
    """Read a log of another trainer; None when the path holds none that is known."""
    state = trl.newest_state(path)
    if state is not None:
        run = RunData(path.stem, path, trl.SOURCE, trainer="TRL")
        return _from_rows(run, trl.logged_steps(state, path), lambda name: trl.NAMES.get(name, name))
    if path.is_dir():
        dumps = sorted(
            (
                file
                for file in path.glob("*.jsonl")
                if file.stem.isdecimal() and as_step(int(file.stem)) is not None
            ),
            key=lambda file: int(file.stem),
        )
        return _from_dumps(path, dumps) if dumps else None
    if (rows := exports.export_rows(path)) is not None:
        return _from_rows(RunData(path.stem, path, exports.SOURCE), rows)
    with path.open("rb") as file:
        head = file.read(_SNIFFED)
    if b"\0" in head:
        return None
    first = parse_line(head.decode("utf-8", "replace").lstrip().partition("\n")[0])
    is_logger = isinstance((first or {}).get("data"), dict) or (
        head.lstrip().startswith(b'{"step":') and b'"data":' in head[:80]
    )
    run = RunData(path.stem, path, FILE_LOGGER if is_logger else CONSOLE, trainer="verl")
    records = read_records(path, run.notes)  # of the file logger: {"step": n, "data": {name: value}}
    logged = ((step, numbers_of(record["data"])) for step, record in records if "data" in record)
    return _from_rows(run, logged if is_logger else _console_lines(path), row_is_step=True)


def rejects(run: RunData) -> bool:
    """Whether tokens were rejected at some step."""
    return any(value > 0 for name in _REJECTED for value in run.get(name).values)


def _console_lines(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Lines ``step:12 - name:value - …`` anywhere in a captured log, behind any prefix."""
    with open_text(path, None) as file:
        for line in lines_of(file):
            if "step:" not in line:
                continue
            match = _CONSOLE_LINE.search(_COLOUR.sub("", line.rstrip("\n")))
            step = None if match is None else as_step(int(match[1]))
            if match is not None and step is not None and (metrics := dict(_console_metrics(match[2]))):
                yield step, metrics


def _console_metrics(text: str) -> Iterator[tuple[str, float]]:
    for part in text.split(" - "):
        name, _, value = part.rpartition(":")
        number = _NUMBER.match(value)
        if name and number is not None:
            yield name.strip(), float(number[1])


def _from_rows(
    run: RunData,
    rows: Iterable[tuple[int, Mapping[str, float]]],
    name_of: Callable[[str], str] = catalogue_name,
    row_is_step: bool = False,
) -> RunData | None:
    """The run with the metrics of all rows under our names, and theirs beside them. None without rows.

    ``row_is_step``: a step that comes twice was logged twice; else a step is as many rows as calls of log.
    """
    columns = Columns()
    for step, metrics in rows:
        names = {name: name_of(name) for name in metrics}
        run.their_names |= {ours: theirs for theirs, ours in names.items() if ours != theirs}
        columns.add(step, {names[name]: value for name, value in metrics.items()})
    if not columns.steps:
        return None
    if not row_is_step:
        columns.repeated = 0
    run.steps, run.series = columns.steps, columns.series()
    run.notes = [f"Read as {run.source}.", *reading_notes(columns), *run.notes]
    if columns.steps[0] > 1:
        run.notes.append(
            f"The log begins at step {columns.steps[0]}: what came before was overwritten or is in another "
            "file."
        )
    run.notes.append(
        "What this log lacks, a run of verl_rc records; `verl-rc migrate --recipe YOUR_SCRIPT.sh` translates "
        "the recipe."
    )
    return run


def _from_dumps(path: Path, files: list[Path]) -> RunData | None:
    """Files ``N.jsonl`` of samples: texts and scores, no log-probs."""
    run, scores = RunData(path.name, path, DUMPS, trainer="verl"), dict[int, list[float]]()
    run.samples = first_and_newest(_dumped(path, files, scores, run.notes), _MOST_DUMPED_SAMPLES, run.notes)
    rows = (
        (step, {"critic/score/mean": sum(step_scores) / len(step_scores)})
        for step, step_scores in scores.items()
    )
    return _from_rows(run, rows)


def _dumped(
    folder: Path, files: list[Path], scores: dict[int, list[float]], notes: list[str]
) -> Iterator[SavedSample]:
    """Yield the samples that have a score, which is added to ``scores`` of its step."""
    left_out = 0
    for file in files:
        for sample in read_lines(file, notes, folder):
            step, score = int(file.stem), as_number(sample.get("score"))
            if score is None or math.isnan(score) or "output" not in sample:
                left_out += 1
                continue
            scores.setdefault(step, []).append(score)
            yield SavedSample(step, {name: cell for name, cell in sample.items() if name != "step"})
    if left_out:
        notes.append(f"{left_out} line(s) of dumps have no output or score, and are left out.")
