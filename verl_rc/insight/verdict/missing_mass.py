"""Probability that is missing: the mean ratio of trainer and engine is not 1. Rows 4 to 7 of the table."""

import math
import statistics

from verl_rc.algorithm.health.causes import cause_statement
from verl_rc.algorithm.health.signature_causes import FILTER, FILTER_OR_RAW, RAW_OR_OTHER_TOKENS
from verl_rc.algorithm.health.statement import Statement, literal
from verl_rc.insight.run_folder import RunData, Series
from verl_rc.insight.run_folder.foreign import rejects
from verl_rc.insight.verdict.estimates import confirm
from verl_rc.insight.verdict.gap_series import K1, K3, SUPPORTS, z_of_mean_ratio
from verl_rc.metrics.bounds import BOUNDS

_ROLLOUT = "actor_rollout_ref.rollout"


def missing_mass_statements(run: RunData) -> list[Statement]:
    """Rows 4 to 7: the tokens were not drawn from what the engine reports."""
    if not run.is_own and rejects(run):
        return []  # others measure kept tokens only: rejection alone moves their mean
    z = z_of_mean_ratio(run)
    for sign, side in ((-1, "below 1"), (1, "above 1")):
        magnitudes = Series(z.steps, [sign * value for value in z.values])
        beyond = confirm(magnitudes, lambda magnitude: magnitude > BOUNDS.z)
        if beyond is None:
            continue
        evidence = {
            "z": statistics.median_high(value for value in magnitudes.values if value > BOUNDS.z),
            "count": beyond.count,
            "steps": len(z),
            "ratio": _mean_ratio(run, *beyond.steps),
        }
        sentence = (
            "The tokens were not drawn from what the engine reports: the mean ratio is "
            f"{side if math.isnan(evidence['ratio']) else '{ratio:.4f} instead of 1'}"
            ", z {z:.0f} ({count:.0f} of {steps:.0f} steps)"
        )
        if sign < 0 and not run.has(SUPPORTS):
            return [_below_one(run, evidence, sentence, beyond.steps)]
        return [
            cause_statement(RAW_OR_OTHER_TOKENS, evidence, sentence, confidence="likely", steps=beyond.steps)
        ]
    return []


def _mean_ratio(run: RunData, first: int, last: int) -> float:
    k1, k3 = run.get(K1).by_step(), run.get(K3).by_step()
    ratios = [1 - k1[step] + k3[step] for step in k1.keys() & k3.keys() if first <= step <= last]
    return math.fsum(ratios) / len(ratios) if ratios else math.nan


def _below_one(run: RunData, evidence: dict[str, float], sentence: str, steps: tuple[int, int]) -> Statement:
    filters = _filters(run)
    evidence["held"] = evidence["ratio"]
    has_ratio = not math.isnan(evidence["ratio"])
    if filters:
        sentence += f"; {literal(' '.join(filters))} is not mirrored by the trainer"
        sentence += ": it leaves {held:.1%} of the mass" if has_ratio else ""
    elif has_ratio:
        sentence += ". A sampling filter that the trainer does not mirror would leave {held:.1%} of the mass"
    return cause_statement(
        FILTER if filters else FILTER_OR_RAW,
        evidence,
        sentence,
        confidence="named" if filters else "likely",
        steps=steps,
        next_test=FILTER_OR_RAW.next_test,
    )


def _filters(run: RunData) -> list[str]:
    """Sampling filters of the configuration, as they are written there."""
    neutral = {f"{_ROLLOUT}.top_p": (1, 1.0), f"{_ROLLOUT}.top_k": (-1, 0), f"{_ROLLOUT}.min_p": (0, 0.0)}
    settings = {key: run.settings[key] for key in neutral if key in run.settings}
    return [
        f"{key}={value}" for key, value in settings.items() if value is not None and value not in neutral[key]
    ]
