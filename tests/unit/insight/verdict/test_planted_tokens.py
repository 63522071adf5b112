"""Planted faults in token records of another trainer: what their fields tell is named as in a run of our
own, and nothing is named wrongly where fields are missing."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_tokens import PLANS, Row, rows_of

from verl_rc.correction import compute_rollout_correction
from verl_rc.insight.run_folder import RunData, Series
from verl_rc.insight.run_folder.folder import with_tokens
from verl_rc.insight.run_folder.records import OWN_RUN
from verl_rc.insight.run_folder.token_files import TokenSource
from verl_rc.insight.verdict import verdict_of
from verl_rc.records.token_records.token_rows import record_of_rows

STEPS = (1, 2)
NATIVELY = {
    "healthy bf16": "rounding",
    "healthy fp8": "rounding",
    "healthy fp32": "rounding",
    "temperature 0.9": "temperature",
    "temperature 0.98": "temperature",
    "raw at 0.7": "raw log-probs at another temperature",
    "top-p 0.95": "sampling filter not mirrored",
    "top-p 0.9": "sampling filter not mirrored",
    "top-k 5": "sampling filter not mirrored",
    "min-p 0.05": "sampling filter not mirrored",
    "min-p 0.3 of flat policies": "sampling filter not mirrored",
    "top-p 0.7 raw": "sampled from another distribution than reported",
    "log-probs shifted": "log-probs shifted",
    "tokens changed": "few tokens are others than sampled",
    "bf16 transport": "log-probs rounded",
    "one engine of two stale": "one engine differs from the others",
    "stop token banned": "token banned",
    "age 4": "staleness",
    "half a tensor": "rounding",
    "NaN": "overflow or empty logits",
}
"""By the trainer's own statistics; half a tensor is not seen without the gap of the start."""


FILTERS = [plan for plan, cause in NATIVELY.items() if cause == "sampling filter not mirrored"]
WITH_ENTROPIES = NATIVELY | {
    "top-p 0.7 raw": "rounding",  # no varentropies
    "one engine of two stale": "rounding",  # no engines
    "age 4": "rounding",  # no versions in these
    "stop token lost": "rounding",  # no stop tokens
    "stop token lost, log-probs shifted": "log-probs of some rows shifted",
    "a completion returned twice": "one sample for several requests",
}
WITHOUT_ENTROPIES = WITH_ENTROPIES | {
    "temperature 0.98": "rounding",
    **dict.fromkeys((*FILTERS, "stop token banned"), "sampling filter or banned token"),
}


def in_tensors(rows: Sequence[Row], name: str) -> torch.Tensor:
    width = max(len(row["response_mask"]) for row in rows)
    return torch.tensor([list(row[name]) + [0.0] * (width - len(row[name])) for row in rows])


def metrics_of_the_trainer(rows: Sequence[Row], step: int) -> dict[str, float]:
    facts: dict[str, Any] = {
        name: in_tensors(rows, field)
        for name, field in (
            ("entropies", "entropy"),
            ("sum_pi_squared", "sum_pi_squared"),
            ("varentropies", "varentropy"),
        )
    }
    if "engine" in rows[0]:
        facts["engines"] = torch.tensor([row["engine"] for row in rows])
    if "version" in rows[0]:
        facts |= {
            "policy_versions": torch.tensor([row["version"] for row in rows]),
            "current_version": step - 1,
        }
    columns = (in_tensors(rows, name) for name in ("old_log_prob", "rollout_log_prob", "response_mask"))
    return compute_rollout_correction(*columns, {"diagnostics": "full"}, **facts).metrics()


def first_cause(run: RunData) -> str:
    """The first fault or notice of the gap; else what is said of it."""
    statements = [statement for statement in verdict_of(run).statements if statement.topic == "gap"]
    return next((one for one in statements if one.level in ("fault", "notice")), statements[0]).cause


@pytest.fixture(scope="module")
def planted_steps() -> Mapping[str, Mapping[int, list[Row]]]:
    return {plan: {step: rows_of(PLANS[plan], 1, step) for step in STEPS} for plan in PLANS}


@pytest.mark.parametrize("plan", NATIVELY)
def test_the_trainer_s_own_statistics_name_it(plan: str, planted_steps: Any) -> None:
    series = defaultdict[str, list[float]](list)
    for step, rows in planted_steps[plan].items():
        for name, value in metrics_of_the_trainer(rows, step).items():
            series[name].append(value)
    columns = {name: Series(STEPS, values) for name, values in series.items() if len(values) == len(STEPS)}
    assert first_cause(RunData("native", Path("native"), OWN_RUN, STEPS, columns)) == NATIVELY[plan]


ALONE = WITHOUT_ENTROPIES | {
    "temperature 0.9": "rounding",
    "raw at 0.7": "raw log-probs, or not those of the sampled tokens",
    "a completion returned twice": "rounding",
    **dict.fromkeys((*FILTERS, "stop token banned"), "sampling filter, banned token or raw log-probs"),
}


LOG_PROBS = ("response_mask", "rollout_log_prob", "old_log_prob")
IDS = (*LOG_PROBS, "prompt_ids", "response_ids")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("names", "expected"),
    [((*IDS, "entropy"), WITH_ENTROPIES), (IDS, WITHOUT_ENTROPIES), (LOG_PROBS, ALONE)],
    ids=["entropies", "ids", "log-probs"],
)
def test_records_with_some_fields_name_the_same_or_nothing(
    plan: str, names: Sequence[str], expected: Mapping[str, str], planted_steps: Any
) -> None:
    run = RunData("alone", Path("alone"), "token records")
    source = TokenSource(
        "mine",
        STEPS,
        lambda step: record_of_rows(
            {}, step, [{name: row[name] for name in names} for row in planted_steps[plan][step]]
        ),
    )
    assert first_cause(with_tokens(run, source)) == expected[plan]
