"""Recorded batches through verl's published correction and through this one: the same weights, masks and
metrics?

verl runs in a process of its own (``in_verl.py``). Where the documents of the two differ, the lines say by
how much.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from evidence.study import Study
from torch import Tensor

from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction
from verl_rc.data.token_parquet import read_record, record_files
from verl_rc.data.token_record import FOLDER
from verl_rc.insight.run_folder import whole_records
from verl_rc.insight.what_if import read_batch
from verl_rc.study.runs import folder_of, missing
from verl_rc.study.study import ROLLOUT

_ENGINES = {"bf16": f"{ROLLOUT}.dtype=bfloat16", "fp8": f"{ROLLOUT}.quantization=fp8_per_channel"}
_AGES = {"k0": (), "k4": ("async=one_step_off", "async_training.staleness_threshold=4")}
RUNS = Study(
    question="Do verl's functions and these make the same weights, masks and metrics of the same batches?",
    expectation="yes, but for k1 bounds that are not 1/u and u, effective sample sizes of row weights, and "
    "rows without tokens ([rollout_correction.md](rollout_correction.md#coming-from-verl)).",
    found="",
    common=(
        *("task=digits", "hardware=cpu", "correction=decoupled_token_is", "trainer.total_training_steps=20"),
        *("trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.report=never"),
        *(
            "actor_rollout_ref.actor.optim.lr=5e-5",
            "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
        ),
        "trainer.token_records.full_freq=5",
    ),
    arms={
        f"{age} {engine}": (given, *ahead)
        for age, ahead in _AGES.items()
        for engine, given in _ENGINES.items()
    },
    seeds=(1,),
    minutes=3,
    figures=(),
    quick=(),
)
"""The runs that record the batches."""

Batch = dict[str, Tensor]
"""``train`` and ``rollout``: float32 ``[B, T]``, nats; ``mask``: bool ``[B, T]``."""
Question = tuple[int, str | dict[str, str]]
"""The place of a batch, and a preset or fields of verl's configuration."""
Ask = Callable[[Sequence[Batch], Sequence[Question]], Sequence[Mapping[str, Any]]]
"""What verl makes of the batches: ``weights`` ``[B, T]`` or None, ``mask`` ``[B, T]`` and ``metrics`` for
each question."""

_LOPSIDED = (
    "rollout_rs=token_k1 rollout_rs_threshold=0.98_1.5",
    "rollout_rs=seq_sum_k1 rollout_rs_threshold=0.9_1.5",
    "rollout_rs=seq_mean_k1 rollout_rs_threshold=0.99_1.001",
)
_BOUNDS = {
    "token": (0.001, 0.1),
    "seq_sum": (0.002, 0.2),
    "seq_mean": (0.0002, 0.02),
    "seq_max": (0.001, 0.1),
}
_K1_BOUNDS = {
    "token_k1": ("1.05", "1.5"),
    "seq_sum_k1": ("1.1", "3.0"),
    "seq_mean_k1": ("1.01", "1.1"),
    "token_k1,seq_mean_k3": ("1.05,0.01", "1.5,0.1"),
}
"""The first of each for a gap of precision, the second for old samples."""
_CONVENTION, _EMPTY = "k1_bound_convention", "a quarter more rows, without tokens"
CASES: Mapping[str, Sequence[str]] = {
    "presets of the same name": [
        name for name, preset in PRESETS.items() if preset.origin == PRESETS["disabled"].origin
    ],
    **{
        f"`rollout_is={level}`": [
            f"rollout_is={level} rollout_is_threshold={bound}{normalised}"
            for bound in bounds
            for normalised in ("", " rollout_is_batch_normalize=True")
        ]
        for level, bounds in {"token": ("1.02", "0.98_1.05"), "sequence": ("1.05", "0.5_2.0")}.items()
    },
    "rules of k2 and k3": [
        f"rollout_rs={scope}_{statistic} rollout_rs_threshold={bound}"
        for scope, bounds in _BOUNDS.items()
        for bound in bounds
        for statistic in ("k2", "k3")
    ],
    "rules of k1 with bounds 1/u and u": [
        f"rollout_rs={rule} rollout_rs_threshold={bound}"
        for rule, bounds in _K1_BOUNDS.items()
        for bound in bounds
    ],
    **{f"`{text}`": [text] for text in _LOPSIDED},
    f"the same three with `{_CONVENTION}=inverse`": [f"{text} {_CONVENTION}=inverse" for text in _LOPSIDED],
    _EMPTY: ["decoupled_seq_is", "decoupled_k3_rs_token_tis"],
}
"""By row of the table: presets that both sides have, or fields of both configurations."""
_PREFIX, _K1_FRACTION = "rollout_corr/", re.compile(r"(_k1_(?:seq_)?fraction_)(high|low)$")
_EXTREME = re.compile(r"(rollout_is_)(max|min)$")
_OF_TOKENS = "rollout_is_ess_applied_token"
_ALIKE, _ZERO = 1e-5, 1e-9
"""Metrics are the same within this part of themselves, as in ``tests/golden``, or when they differ by this
much at most."""
_WHY = {
    "rollout_is_seq_mean": "in verl a row without tokens has the weight 0",
    "training_ppl": "in verl such a row has the perplexity 1",
    "rollout_is_eff_sample_size": f"of rows; in verl of their tokens, which here is `{_OF_TOKENS}`",
    "rollout_rs_seq_mean_k1_std": "of values clamped to the band, and 1/1.001 is not quite 0.999",
}
"""What is told of metrics that differ, most telling first."""


@dataclass(frozen=True)
class Recorded:
    """A batch, and what sampled it."""

    samples: str
    """Age and engine."""
    step: int
    batch: Batch


@dataclass(frozen=True)
class Compared:
    """One batch with one correction."""

    samples: str
    step: int
    group: str
    case: str
    rows: int
    tokens: int
    weights: float | None
    """Largest relative difference; None without weights."""
    kept: int
    """Tokens that are not rejected here."""
    kept_by_verl: int
    kept_otherwise: int
    """Tokens that one side keeps and the other rejects."""
    metrics: int
    """How many both sides report."""
    differing: dict[str, list[float]]
    """Of those that differ: here, and in verl."""


def batches_of(folder: Path) -> Iterator[Recorded]:
    """The whole batches that the runs recorded."""
    for arm, seed in missing(RUNS, {}):
        run = folder_of(folder, arm, seed)
        for step, path in record_files(run / FOLDER):
            if read_record(path).facts["why"] == "full":
                batch = read_batch(run, only=[step])
                yield Recorded(
                    arm, step, {"train": batch.train, "rollout": batch.rollout, "mask": batch.mask}
                )


def with_empty_rows(batch: Batch) -> Batch:
    """A quarter more rows, without tokens."""
    return {
        name: torch.cat([values, torch.zeros_like(values[: len(values) // 4])])
        for name, values in batch.items()
    }


def compare(recorded: Sequence[Recorded], ask: Ask) -> Iterator[Compared]:
    """Every batch with every correction."""
    batches = [batch for record in recorded for batch in (record.batch, with_empty_rows(record.batch))]
    cases = [(group, case) for group, group_cases in CASES.items() for case in group_cases]
    questions = [(number, group, case) for number in range(len(recorded)) for group, case in cases]
    places = [2 * number + (group == _EMPTY) for number, group, _ in questions]
    answers = ask(
        batches, [(place, verls(case)) for place, (_, _, case) in zip(places, questions, strict=True)]
    )
    for (number, group, case), place, answer in zip(questions, places, answers, strict=True):
        batch, record = batches[place], recorded[number]
        config = ours(case)
        result = compute_rollout_correction(batch["train"], batch["rollout"], batch["mask"], config)
        kept, kept_by_verl = batch["mask"] & result.keep_mask, answer["mask"]
        metrics = pairs_of_metrics(result.metrics(), answer["metrics"], config.rollout_is == "sequence")
        yield Compared(
            samples=record.samples,
            step=record.step,
            group=group,
            case=case,
            rows=len(kept),
            tokens=int(batch["mask"].sum()),
            weights=None if result.weights is None else largest_difference(result.weights, answer["weights"]),
            kept=int(kept.sum()),
            kept_by_verl=int(kept_by_verl.sum()),
            kept_otherwise=int((kept != kept_by_verl).sum()),
            metrics=len(metrics),
            differing={
                name: [float(f"{value:.6g}") for value in pair]
                for name, pair in metrics.items()
                if not math.isclose(*pair, rel_tol=_ALIKE, abs_tol=_ZERO)
            },
        )


def ours(case: str) -> RolloutCorrectionConfig:
    """The correction of a case."""
    return (
        RolloutCorrectionConfig.from_legacy(_fields(case))[0]
        if "=" in case
        else RolloutCorrectionConfig.from_preset(case)
    )


def verls(case: str) -> str | dict[str, str]:
    """What verl is told: it reads k1 bounds in one way only."""
    return (
        {name: value for name, value in _fields(case).items() if name != _CONVENTION} if "=" in case else case
    )


def _fields(case: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in case.split())


def largest_difference(ours: Tensor, verls: Tensor) -> float:
    """Of two tensors of one shape, relative to the second; infinite where that one alone is 0."""
    difference = (ours.double() - verls.double()).abs()
    return float(torch.where(difference == 0, 0.0, difference / verls.double().abs()).max())


def pairs_of_metrics(
    ours: Mapping[str, float], verls: Mapping[str, float], weighs_rows: bool
) -> dict[str, tuple[float, float]]:
    """Metrics of one meaning, here and in verl, by their name here without prefix.

    verl's fractions above and below the bounds of k1 count its statistic, which is low where the ratio is
    high; its extremes of row weights are of raw ones.
    """
    pairs = {}
    for name, value in verls.items():
        own_name = _K1_FRACTION.sub(lambda match: match[1] + {"high": "low", "low": "high"}[match[2]], name)
        own_name = _EXTREME.sub(r"\1raw_\2", own_name) if weighs_rows else own_name
        if own_name in ours:
            pairs[own_name.removeprefix(_PREFIX)] = (ours[own_name], value)
    if (ess := verls.get(f"{_PREFIX}rollout_is_eff_sample_size")) is not None:
        pairs[_OF_TOKENS] = (ours[_PREFIX + _OF_TOKENS], ess)
    return pairs


def ask_verl(folder: Path) -> Ask:
    """verl as installed in a folder, run in a process of its own. That may raise ``CalledProcessError``."""

    def ask(batches: Sequence[Batch], questions: Sequence[Question]) -> Sequence[Mapping[str, Any]]:
        with tempfile.TemporaryDirectory() as place:
            question_file, answers = Path(place, "given.pt"), Path(place, "answers.pt")
            torch.save((list(batches), list(questions)), question_file)
            command = [
                sys.executable,
                str(Path(__file__).with_name("in_verl.py")),
                str(question_file),
                str(answers),
            ]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": str(folder.resolve())}, check=True)
            results: Sequence[Mapping[str, Any]] = torch.load(answers)
            return results

    return ask


def write_lines(path: Path, lines: Sequence[Compared]) -> None:
    """In place of what was there."""
    path.write_text("".join(f"{json.dumps(asdict(line))}\n" for line in lines), encoding="utf-8")


def read_lines(path: Path) -> list[Compared]:
    """What ``write_lines`` wrote; nothing without the file."""
    return [Compared(**record) for record in whole_records(path)]


def section(lines: Sequence[Compared]) -> list[str]:
    """The blocks of the page."""
    groups = {
        name: [line for line in lines if line.group == name]
        for name in dict.fromkeys(line.group for line in lines)
    }
    titles = (
        "correction",
        "ways",
        "weights differ by",
        "tokens kept otherwise",
        "metrics that differ",
        "what differs",
    )
    rows = [
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
        *(_row(name, group) for name, group in groups.items()),
    ]
    batches = {(line.samples, line.step): line.tokens for line in lines}
    turned = [name for name, group in groups.items() if any(line.kept_otherwise for line in group)]
    weights = max(line.weights for line in lines if line.weights is not None)
    defined = sorted(
        {f"`{name}`" for line in lines if line.group not in (*turned, _EMPTY) for name in line.differing}
    )
    otherwise = f" but with {_and(turned)}" if turned else ""
    other_meaning = f" but for {_and(defined)}" if defined else ""
    differences = (
        f"Found: {len(batches)} whole batches ({_and(_samples(lines))}; k4: up to four steps old), "
        f"{sum(batches.values()):,} tokens, {len({line.case for line in lines})} ways to correct them. "
        f"Weights differ by {weights:.1g} of themselves at most. Both keep the same tokens "
        f"everywhere{otherwise}. Where they do, metrics are the same within {_ALIKE:g}{other_meaning}, and "
        "but for batches with empty rows."
    )
    how = (
        "Run with `pip install --target VERL --no-deps verl==0.9.1 codetiming orjson` and `python -m "
        "scripts.evidence against_verl --verl VERL`: verl's functions run as published, in a process of "
        "their own with this project's packages. verl is asked twice: for weights and masks in float32, as "
        "it runs, and for metrics in float64, so that what differs is a formula and not rounding. This "
        "project runs once, on what was recorded. verl's `fraction_high` of a k1 rule is `fraction_low` "
        "here, its `rollout_is_max` and `rollout_is_min` of row weights are `rollout_is_raw_max` and "
        "`rollout_is_raw_min`. Bypass presets are at their first update. Not compared: losses, log-probs "
        "that are not finite, batches without any weight."
    )
    prose = (
        RUNS.question,
        f"Expected, from the documents and code of both: {RUNS.expectation}",
        differences,
        how,
    )
    return [
        "## against_verl",
        *(textwrap.fill(paragraph, 100, break_on_hyphens=False) for paragraph in prose),
        "\n".join(rows),
    ]


def _row(name: str, lines: Sequence[Compared]) -> str:
    weights = [line.weights for line in lines if line.weights is not None]
    tokens, kept, by_verl, otherwise = (
        sum(getattr(line, field) for line in lines)
        for field in ("tokens", "kept", "kept_by_verl", "kept_otherwise")
    )
    differing, metrics = sum(len(line.differing) for line in lines), sum(line.metrics for line in lines)
    if otherwise:
        description = (
            f"verl keeps {by_verl / tokens:.0%} of the tokens, this project {kept / tokens:.0%}; of what "
            "verl keeps, so much is outside the band of train/rollout: "
            f"{', '.join(f'{sample} {_outside(lines, sample):.0%}' for sample in _samples(lines))}"
        )
    else:
        names = [*_WHY, *sorted({metric for line in lines for metric in line.differing} - {*_WHY})]
        description = (
            "; ".join([text for metric in names if (text := _worst(metric, lines))][:2]) or "nothing"
        )
    cells = [
        name,
        str(len({line.case for line in lines})),
        f"{max(weights):.1g}" if weights else "—",
        f"{otherwise:,} of {tokens:,}",
        f"{differing:,} of {metrics:,}",
        description,
    ]
    return f"| {' | '.join(cells)} |"


def _samples(lines: Sequence[Compared]) -> list[str]:
    return list(dict.fromkeys(line.samples for line in lines))


def _outside(lines: Sequence[Compared], samples: str) -> float:
    """Of the tokens that verl keeps, the share that is rejected here."""
    ours, by_verl, otherwise = (
        sum(getattr(line, field) for line in lines if line.samples == samples)
        for field in ("kept", "kept_by_verl", "kept_otherwise")
    )
    return (by_verl - ours + otherwise) / 2 / max(by_verl, 1)


def _worst(metric: str, lines: Sequence[Compared]) -> str:
    """The pair that differs most; empty where none does."""
    pairs = [line.differing[metric] for line in lines if metric in line.differing]
    if not pairs:
        return ""
    own_value, by_verl = max(pairs, key=lambda pair: abs(pair[0] - pair[1]) / max(abs(pair[0]), abs(pair[1])))
    return (
        f"`{metric}` {own_value:.5g}, in verl {by_verl:.5g}{f' ({_WHY[metric]})' if metric in _WHY else ''}"
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
