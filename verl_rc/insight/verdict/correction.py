"""The cost of the correction: effective sample size, rejection, and the length at which weights of whole rows
fail."""

import math

from verl_rc.algorithm.health.statement import Statement, filled_statement, literal
from verl_rc.insight.run_folder import RunData, Series
from verl_rc.insight.verdict.estimates import confirm, last_mean, last_tenth, mean_of
from verl_rc.metrics.catalog import describe

ESS = "rollout_corr/rollout_is_eff_sample_size"
_REJECTED = "rollout_corr/rollout_rs_masked_fraction"
LOW_ESS = describe(ESS).lowest_healthy
"""Share of the batch below which the weights waste more than the gap costs."""
MUCH_REJECTED = describe(_REJECTED).highest_healthy
_SECTION = "algorithm.rollout_correction"
_LEVELS = {"token": "tokens", "sequence": "rows", "prefix": "prefixes", "turn": "turns", "geometric": "rows"}


def correction_statements(run: RunData) -> list[Statement]:
    """Statements about faults of weights and rejection, or one about their cost if there is none."""
    return [*_low_ess(run), *_rejected(run)] or [_cost(run)]


def half_ess_length(run: RunData) -> Series:
    """Return by step the length at which the product of a row's ratios halves the effective sample size: ln 2
    / (2 k3) tokens."""
    k3 = run.get("rollout_corr/k3_kl").by_step()
    return Series.from_steps({step: math.log(2) / (2 * value) for step, value in k3.items() if value > 0})


def _level(run: RunData) -> str:
    return str(run.settings.get(f"{_SECTION}.rollout_is", ""))


def _low_ess(run: RunData) -> list[Statement]:
    ess = last_mean(run, ESS)
    if ess is None or ess.value >= LOW_ESS:
        return []
    low = confirm(run.get(ESS), lambda value: value < LOW_ESS)
    evidence = {"ess": ess.value}
    template = "The weights leave {ess:.0%} of the batch"
    half, length = mean_of(last_tenth(half_ess_length(run))), last_mean(run, "response_length/mean")
    is_too_long = False
    if half is not None and length is not None and _level(run) in ("sequence", ""):
        is_too_long = length.value > half.value
    if half is not None and length is not None and is_too_long:
        evidence |= {"half": half.value, "length": length.value}
        template += (
            "; with this gap, weights of whole rows lose half of it at {half:.2g} tokens, and responses have "
            "{length:.0f}"
        )
    return [
        filled_statement(
            "correction",
            "weights waste the batch",
            "fault" if ess.value < LOW_ESS / 2 else "notice",
            template,
            evidence,
            confidence="named" if low else "likely",
            steps=low.steps if low else ess.steps,
            next_test="Weigh tokens instead of rows."
            if is_too_long
            else "Close the gap first; then lower the cap of the weights.",
            overrides=(f"{_SECTION}.rollout_is=token",) if is_too_long else (),
        )
    ]


def _rejected(run: RunData) -> list[Statement]:
    rejected = last_mean(run, _REJECTED)
    if rejected is None or rejected.value <= MUCH_REJECTED:
        return []
    rules = {
        name.removeprefix("rollout_corr/rollout_rs_").removesuffix("_masked_fraction"): mean.value
        for name, series in run.matching("rollout_corr/rollout_rs_", "_masked_fraction")
        if not name.endswith(("_seq_masked_fraction", "rollout_rs_masked_fraction"))
        and (mean := mean_of(last_tenth(series)))
    }
    evidence = {"rejected": rejected.value}
    template = "{rejected:.0%} of the tokens are rejected"
    if rules:
        worst = max(rules, key=lambda rule: rules[rule])
        evidence["worst"] = rules[worst]
        template += f", {{worst:.0%}} by {literal(worst)}"
    kept_score = last_mean(run, "rollout_corr/kept_score_mean")
    rejected_score = last_mean(run, "rollout_corr/rejected_score_mean")
    if kept_score is not None and rejected_score is not None:
        evidence |= {"kept_score": kept_score.value, "rejected_score": rejected_score.value}
        template += "; rejected rows score {rejected_score:.3g}, kept ones {kept_score:.3g}"
    return [
        filled_statement(
            "correction",
            "much is rejected",
            "notice",
            template,
            evidence,
            confidence="named" if rejected.count > 1 else "likely",
            steps=rejected.steps,
            next_test="Filters are for log-probs that are wrong, not for rounding: compare with weights "
            "alone.",
            overrides=(f"{_SECTION}.rollout_rs=null",),
        )
    ]


def _cost(run: RunData) -> Statement:
    ess = last_mean(run, ESS)
    half, length = mean_of(last_tenth(half_ess_length(run))), last_mean(run, "response_length/mean")
    evidence: dict[str, float] = {}
    reach = ""
    if half is not None and length is not None:
        evidence |= {"half": half.value, "length": length.value}
        reach = (
            "; weights of whole rows would lose half the sample at {half:,.0f} tokens, responses have "
            "{length:,.0f}"
        )
    if ess is None:
        if half is None:
            sentence = "The correction cannot be told: neither weights nor rollout_corr/k3_kl were logged"
            return filled_statement("correction", "not measured", "unknown", sentence, {})
        return filled_statement(
            "correction", "measures only", "good", "Nothing is weighted" + reach, evidence, steps=half.steps
        )
    rejected = last_mean(run, _REJECTED)
    evidence["ess"] = ess.value
    unit = f" of the {_LEVELS[_level(run)]}" if _level(run) in _LEVELS else ""
    template = "The weights keep {ess:.1%}" + unit
    if ess.interval is not None:
        evidence["low"], evidence["high"] = ess.interval
        template += " ({low:.1%} to {high:.1%})"
    if rejected is not None:
        evidence["rejected"] = rejected.value
        template += ", {rejected:.1%} of the tokens are rejected"
    return filled_statement("correction", "cheap", "good", template + reach, evidence, steps=ess.steps)
