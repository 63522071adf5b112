"""A temperature is a straight line over log-probs, by its definition; a soft cap of the logits bends."""

from collections.abc import Sequence

import numpy as np
import pytest
from planted_tokens import Array, Planted, Row, rows_of

from verl_rc.insight.run_folder.bend import Bend, BendSums
from verl_rc.insight.run_folder.signature_sums import ComparedTokens
from verl_rc.metrics.bounds import BOUNDS
from verl_rc.records.token_records.token_rows import record_of_rows

FIELDS = ("all", "without varentropy", "without distributions")
DISTRIBUTIONS = ("entropy", "sum_pi_squared", "varentropy")


def tokens_of(rows: Sequence[Row], fields: str = "all") -> ComparedTokens:
    lacking = {"all": (), "without varentropy": DISTRIBUTIONS[2:], "without distributions": DISTRIBUTIONS}
    kept = [{name: value for name, value in row.items() if name not in lacking[fields]} for row in rows]
    tokens = ComparedTokens.from_record(record_of_rows({}, 1, kept))
    assert tokens is not None
    return tokens


def bends_of(plan: Planted, records: int = 2) -> dict[str, Bend | None]:
    """With all fields and with fewer, over some records."""
    rows = [rows_of(plan, seed, 1) for seed in range(records)]
    sums = {fields: BendSums() for fields in FIELDS}
    for fields in FIELDS:
        for record in rows:
            sums[fields].add(tokens_of(record, fields))
    return {fields: sums[fields].bend() for fields in FIELDS}


def is_bent(bend: Bend | None) -> bool:
    assert bend is not None
    return abs(bend.z) > BOUNDS.z and bend.share > BOUNDS.bend


def capped(logits: Array, _: Array) -> Array:
    """The engine's logits are those of which the trainer's are 10 tanh(x / 10)."""
    return 10 * np.arctanh(np.clip(logits / 10, -0.999, 0.999))


@pytest.mark.parametrize("temperature", [0.5, 0.9, 2.0])
@pytest.mark.parametrize(("sharpest", "noise"), [(0.0, 0.03), (2.0, 1e-6), (4.0, 0.03)])
def test_no_temperature_bends(temperature: float, sharpest: float, noise: float) -> None:
    """From half to twice the trainer's, of flat policies and of certain ones."""
    bends = bends_of(Planted(engine_temperature=temperature, sharpest=sharpest, noise=noise))
    assert not any(map(is_bent, bends.values()))


def test_a_soft_cap_bends() -> None:
    assert is_bent(bends_of(Planted(narrowed=capped))["all"])


def test_squares_of_logits_bend() -> None:
    """Behind equal prefixes, too, where few tokens tell."""
    plan = Planted(narrowed=lambda logits, _: logits + 0.1 * logits**2, sharpest=0.3)
    assert all(map(is_bent, bends_of(plan, records=6).values()))


def test_the_share_is_that_of_least_squares() -> None:
    """What the last of three regressors explains beside the others, by numpy's own fit."""
    tokens = tokens_of(rows_of(Planted(narrowed=capped), 1, 1))
    u, v = tokens.old_log_probs + tokens.finite("entropy"), tokens.finite("varentropy")
    regressors = np.stack([u, v, u**2 - v], 1)
    left = [
        float(np.linalg.lstsq(regressors[:, :count], tokens.log_ratios, rcond=None)[1][0]) for count in (2, 3)
    ]
    sums = BendSums()
    sums.add(tokens)
    bend = sums.bend()
    assert bend is not None
    assert bend.share == pytest.approx((left[0] - left[1]) / float(tokens.log_ratios @ tokens.log_ratios))


def test_records_that_do_not_tell() -> None:
    assert BendSums().bend() is None
    sums = BendSums()
    row = {"response_mask": [1], "rollout_log_prob": [-1.0], "old_log_prob": [-1.1]}
    tokens = ComparedTokens.from_record(record_of_rows({}, 1, [row]))
    assert tokens is not None
    sums.add(tokens)
    assert sums.bend() is None
