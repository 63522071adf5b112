"""Sums of token records are those that a trainer adds up in tensors, to the last digits of float64."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from planted_tokens import PLANS, rows_of

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionStatistics, SequenceContext, measure
from verl_rc.insight.run_folder.signature_sums import (
    ComparedTokens,
    log_ratio_counts,
    noise_interval,
    signature_sums,
)
from verl_rc.metrics.signatures import signature_metrics
from verl_rc.records.token_records.token_record import TokenRecord
from verl_rc.records.token_records.token_rows import record_of_rows

FACTS = {
    "entropies": "entropy",
    "sum_pi_squared": "sum_pi_squared",
    "varentropies": "varentropy",
    "engines": "engine",
}


def random_record(seed: int, count: int = 12, without: tuple[str, ...] = ()) -> TokenRecord:
    """Rows of many lengths with holes for tools, rounded and infinite log-probs, of several engines."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(generator.choice([1, 3, 8, 17, 90, 300, 700]))
        train = -generator.exponential(1.0, length).astype("float32")
        rollout = np.minimum(train + 0.1 * generator.standard_normal(length), 0.0).astype("float32")
        rollout[::5] = rollout[::5].astype("float16")
        train[generator.random(length) < 0.03] = -np.inf
        probability = np.exp(train.astype("float64"))
        row: dict[str, Any] = {
            "response_mask": generator.random(length) < 0.9,
            "rollout_log_prob": rollout,
            "old_log_prob": train,
            "entropy": 2 * generator.random(length),
            "sum_pi_squared": probability**2 + 0.1 * generator.random(length),
            "varentropy": generator.random(length),
            "engine": int(generator.integers(0, 20)),
        }
        row["response_mask"][0] = True
        if index == 0:
            row["entropy"][0] = np.nan
        rows.append({name: value for name, value in row.items() if name not in without})
    return record_of_rows({"trainer": "test"}, 1, rows)


def in_tensors(record: TokenRecord) -> CorrectionStatistics:
    """The trainer's statistics of the same rows, padded, in float64."""
    width = int(record.lengths.max())

    def padded(values: Any) -> torch.Tensor:
        flat = torch.full((len(record.lengths), width), torch.nan, dtype=torch.float64)
        for index in range(len(record.lengths)):
            flat[index, : record.lengths[index]] = torch.tensor(values[record.span(index)].astype("float64"))
        return flat

    facts: dict[str, Any] = {
        theirs: padded(record.tokens[ours]) for theirs, ours in FACTS.items() if ours in record.tokens
    }
    if "engine" in record.rows:
        facts["engines"] = torch.tensor(record.rows["engine"].astype("int64"))
    return measure(
        padded(record.tokens["old_log_prob"]),
        padded(record.tokens["rollout_log_prob"]),
        padded(record.tokens["response_mask"]).nan_to_num(0.0),
        RolloutCorrectionConfig(diagnostics="full"),
        SequenceContext(**facts),
    )


def flat(value: Any) -> list[float]:
    """The numbers of a record of sums, in order."""
    if value is None:
        return []
    if isinstance(value, float):
        return [value]
    parts = value if isinstance(value, tuple) else [getattr(value, field.name) for field in fields(value)]
    return [number for part in parts for number in flat(part)]


@pytest.mark.parametrize(
    "without", [(), ("entropy", "varentropy"), ("sum_pi_squared", "engine"), ("varentropy",)]
)
@pytest.mark.parametrize("seed", range(4))
def test_sums_and_metrics_are_those_of_the_trainer(seed: int, without: tuple[str, ...]) -> None:
    record = random_record(seed, without=without)
    numbers = in_tensors(record).numbers()
    tokens = ComparedTokens.from_record(record)
    assert tokens is not None
    sums, counts = signature_sums(tokens), log_ratio_counts(tokens)
    assert numbers.totals.signatures is not None
    np.testing.assert_allclose(flat(sums), flat(numbers.totals.signatures), rtol=1e-12, atol=1e-13)
    assert counts == numbers.histograms[0]
    expected = signature_metrics(numbers.totals.signatures, numbers.histograms[0])
    assert signature_metrics(sums, counts) == pytest.approx(expected, rel=1e-10)


def test_rows_that_were_not_drawn_at_random_do_not_count() -> None:
    record = random_record(0)
    worst = record.rows | {"chosen_by": np.array(["worst"] + ["random"] * 11, dtype=object)}
    tokens = ComparedTokens.from_record(TokenRecord(record.facts, worst, record.lengths, record.tokens))
    assert tokens is not None
    assert not tokens.is_compared[record.span(0)].any()
    assert tokens.is_compared[record.span(1)].any()


def test_the_interval_of_logit_noise_holds_what_it_is_and_entropies_narrow_it() -> None:
    rows = rows_of(PLANS["healthy bf16"], seed=1, step=1)
    noises, widths = [], []
    for without in (("sum_pi_squared",), ("sum_pi_squared", "entropy")):
        known = [{name: value for name, value in row.items() if name not in without} for row in rows]
        exact, interval = (ComparedTokens.from_record(record_of_rows({}, 1, each)) for each in (rows, known))
        assert exact is not None
        assert interval is not None
        metrics = signature_metrics(signature_sums(exact), log_ratio_counts(exact))
        bounds = noise_interval(interval)
        noises.append(bounds["logit_noise_least"] < metrics["logit_noise"] < bounds["logit_noise_most"])
        widths.append(bounds["logit_noise_most"] / bounds["logit_noise_least"])
        assert not noise_interval(exact)
    assert all(noises)
    assert widths[1] == pytest.approx(2**0.5)
    assert widths[0] < widths[1] - 0.05
