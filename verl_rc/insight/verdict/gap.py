"""The gap between engine and trainer: the causes that metrics alone can name, in the order of the table.

k1 and k3 are ``rollout_corr/kl`` and ``rollout_corr/k3_kl``. If the tokens were drawn from the policy that
the engine reports, the mean ratio 1 - k1 + k3 is 1 however large the gap is. sqrt(k3) is the size of the gap,
in nats per token.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from verl_rc.algorithm.health import cause_table as table
from verl_rc.algorithm.health.causes import PREFIX, cause_statement
from verl_rc.algorithm.health.signature_causes import RAW_LOG_PROBS
from verl_rc.algorithm.health.statement import Confidence, Statement, filled_statement, literal
from verl_rc.config.async_training import NEEDS_ASYNCHRONY, AsyncTrainingConfig
from verl_rc.config.models import torch_name
from verl_rc.insight.run_folder import RunData, Series
from verl_rc.insight.verdict.estimates import (
    FEWEST_FOR_TREND,
    LINEAR,
    FittedLine,
    confirm,
    fit_line,
    last_tenth,
    mean_of,
)
from verl_rc.insight.verdict.gap_series import (
    GAP,
    K3,
    at_the_start,
    gap_size,
    gaps_by_age,
    measures_of_gap,
    nats_of_k3,
    policy_distance,
)
from verl_rc.insight.verdict.invariants import invariant_causes
from verl_rc.insight.verdict.missing_mass import missing_mass_statements
from verl_rc.insight.verdict.signatures import has_signatures, signature_causes, signature_rows
from verl_rc.metrics.bounds import BOUNDS, PLAUSIBLE_NOISE, least_precise

PINNED_SLOPE = 0.1
"""Nats of gap for each nat that the policy moved, from which on old weights are the cause and not a slow
growth of rounding."""
_MOST_JUMPS = 0.25
"""Share of the steps up to which a large gap is one of single steps."""
_FEWEST_AT_START = 2
_FEWEST_FOR_LAG = 20
_FEWEST_POINTS_OF_AGES = 6

_AGES = ("rollout_corr/token_age_mean", "async/token_age/mean")
_ROLLOUT, _CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
_MODEL, _SURVIVAL = "actor_rollout_ref.model", "sync/update_survival"
_SOMETHING_ELSE = "engine and trainer differ in something else, which metrics do not tell apart"
_COMPARE_INPUTS = (
    "Compare the prompts, positions and masks that engine and trainer get for the same row. If they are "
    "equal, run ten steps with the engine in float32, without prefix caching."
)
_FAULTS_OF_NUMBERS = {
    "rollout_corr/nonfinite_token_fraction": "log-probs that are NaN or infinite: empty logits or an "
    "overflow",
    "rollout_corr/safety_clamped_fraction": "log-ratios beyond the bound of exp: an overflow, or log-probs "
    "of other tokens",
}


def gap_statements(run: RunData) -> list[Statement]:
    """A statement for every cause that the metrics name, in the order of the table; where they name none, one
    about the size of the gap."""
    if run.settings.get("actor_rollout_ref.exact") and (measures := measures_of_gap(run)):
        return [_staleness_alone(*measures[0])]
    faults = [*_raw_log_probs(run), *invariant_causes(run), *_not_finite(run)]
    if all(fault.cause != table.FLOORED.name for fault in faults):  # sums of cut log-probs name other causes
        faults += signature_causes(run) if has_signatures(run) else missing_mass_statements(run)
    if not faults:
        rules = (
            _lost_in_rounding,
            _staleness,
            _weights_never_arrive,
            _one_version_late,
            _staleness_at_one_age,
            _missed_update,
            _drift_within_the_step,
            _large_from_the_start,
        )
        faults = next((statements for rule in rules if (statements := rule(run))), [])
    return faults or [_with_limits(_size_statement(run), run)]


def _staleness_alone(gap: Series, unit: str) -> Statement:
    """The gap of a run in exact mode, where engine and trainer agree on every token of the same weights."""
    last = mean_of(last_tenth(gap))
    assert last is not None, "a gap that was measured has a last value"
    return cause_statement(
        table.STALENESS if last.value else table.ROUNDING,
        {"gap": last.value},
        sentence=f"The gap is {{gap:.4f}} {unit}: exact mode leaves no rounding, all of it is staleness",
        confidence="named",
        steps=last.steps,
    )


def _raw_log_probs(run: RunData) -> list[Statement]:
    """Raw log-probs at a temperature other than 1, where the token records say so themselves."""
    facts = {} if run.tokens is None else run.tokens.facts
    temperature, mode = facts.get("temperature", 1.0), str(facts.get("logprobs_mode", ""))
    if not isinstance(temperature, int | float) or temperature == 1.0 or not mode.startswith("raw"):
        return []
    sentence = (
        f"By its records the engine samples at temperature {temperature:g} and reports {literal(mode)}, "
        "those of temperature 1"
    )
    return [cause_statement(RAW_LOG_PROBS, {}, sentence, confidence="named")]


def _with_limits(statement: Statement, run: RunData) -> Statement:
    if has_signatures(run) or statement.level == "unknown":
        return statement
    key = f"{_CORRECTION}.diagnostics=full records" if run.is_own else "verl_rc would record"
    limits = f"Another temperature and raw log-probs cannot be told: {key} their signatures"
    return replace(statement, sentence=f"{statement.sentence}. {limits}")


def _not_finite(run: RunData) -> list[Statement]:
    """Row 1."""
    statements = []
    for name, meaning in _FAULTS_OF_NUMBERS.items():
        series = run.get(name)
        touched = {step: value for step, value in series.by_step().items() if value > 0}
        if touched:
            statements.append(
                cause_statement(
                    table.OVERFLOW,
                    {
                        "share": max(touched.values()),
                        "count": len(touched),
                        "steps": len(series),
                    },
                    sentence="Up to {share:.3%} of a step's tokens have "
                    + meaning
                    + " ({count:.0f} of {steps:.0f} steps)",
                    confidence="named" if len(touched) > 1 else "likely",
                    steps=(min(touched), max(touched)),
                )
            )
    return statements


def _lost_in_rounding(run: RunData) -> list[Statement]:
    """Row 26: the trainer has compared the engines' numbers of the weights before and after updates."""
    survival = run.get(_SURVIVAL)
    if len(survival) < BOUNDS.fewest_survivals or statistics.median(survival.values) >= BOUNDS.survival:
        return []
    return [
        cause_statement(
            table.LOST_IN_ROUNDING,
            {"survival": statistics.median(survival.values), "count": len(survival)},
            confidence="named",
            steps=(survival.steps[0], survival.steps[-1]),
            overrides=_precise_override(run),
        )
    ]


def _precise_override(run: RunData) -> tuple[str, ...]:
    """The override with which engines get small updates: adapters as they are, or weights without
    quantisation."""
    if not run.is_own:
        return ()
    if run.settings.get(f"{_MODEL}.lora_rank", 0) and run.settings.get(f"{_MODEL}.lora.merge", True):
        return (f"{_MODEL}.lora.merge=False",)
    return (f"{_ROLLOUT}.quantization=null",) if run.settings.get(f"{_ROLLOUT}.quantization") else ()


def _staleness(run: RunData) -> list[Statement]:
    """Row 16: the gap grows with the age of a token."""
    gaps = gaps_by_age(run)
    points = [(float(age), gap) for age, series in gaps.items() for gap in series.values]
    line = (
        fit_line(*zip(*points, strict=True))
        if len(gaps) > 1 and len(points) >= _FEWEST_POINTS_OF_AGES
        else None
    )
    return _grows_with_age(run, gaps, line, "named" if len(gaps) > 2 else "likely")


def _staleness_at_one_age(run: RunData) -> list[Statement]:
    """Row 16 where nearly all tokens have one age.

    Tokens of other ages come from the first steps only, whose updates are no measure of a slope.
    """
    gaps = gaps_by_age(run)
    if len(gaps) < 2:
        return []
    youngest, usual = min(gaps), max(gaps, key=lambda age: len(gaps[age]))
    if usual == youngest:
        return []
    low, high = (math.fsum(gaps[age].values) / len(gaps[age]) for age in (youngest, usual))
    slope = (high - low) / (usual - youngest)
    age_gaps = {age: gaps[age] for age in (youngest, usual)}
    return _grows_with_age(run, age_gaps, FittedLine(slope, low - slope * youngest, 1.0), "likely")


def _grows_with_age(
    run: RunData, gaps: Mapping[int, Series], line: FittedLine | None, confidence: Confidence
) -> list[Statement]:
    floor = mean_of(gaps[min(gaps)]) if gaps else None
    if line is None or floor is None or line.r_squared <= LINEAR or line.slope <= 0:
        return []
    oldest = max(gaps)
    if line.intercept + line.slope * oldest < BOUNDS.above_floor * floor.value:
        return []
    return [
        cause_statement(
            table.STALENESS,
            {
                "slope": line.slope,
                "r": line.r_squared,
                "floor": floor.value,
                "oldest": oldest,
                "oldest_gap": line.intercept + line.slope * oldest,
            },
            confidence=confidence,
            steps=floor.steps,
            overrides=_synchronous_override(run),
        )
    ]


def _synchronous_override(run: RunData) -> tuple[str, ...]:
    """The override that makes training synchronous; empty where its key is not the run's, or other keys need
    asynchrony."""
    defaults = {
        f"async_training.{key}": AsyncTrainingConfig.model_fields[key].default for key in NEEDS_ASYNCHRONY
    }
    defaults |= {f"{_ROLLOUT}.checkpoint_engine.stage_updates": False, f"{_CORRECTION}.proximal": "recompute"}
    stands_alone = all(run.settings.get(key, default) == default for key, default in defaults.items())
    return ("async_training.staleness_threshold=0",) if run.is_own and stands_alone else ()


def _weights_never_arrive(run: RunData) -> list[Statement]:
    """Row 18: the gap, by one of its measures, is a straight line in what the policy has moved since the
    start.

    Old weights make sqrt(k3) large at once and then slow, the mean |log-ratio| less so.
    """
    for gap, _ in measures_of_gap(run):
        last, line = mean_of(last_tenth(gap)), fit_line(policy_distance(run, gap.steps), gap.values)
        if (
            len(gap) >= FEWEST_FOR_TREND
            and last is not None
            and last.value >= BOUNDS.above_floor * gap.values[0]
            and line is not None
            and line.r_squared > LINEAR
            and line.slope >= PINNED_SLOPE
        ):
            return [
                cause_statement(
                    table.WEIGHTS_NEVER_ARRIVE,
                    {"first": gap.values[0], "last": last.value, "slope": line.slope, "r": line.r_squared},
                    confidence="named",
                    steps=(gap.steps[0], gap.steps[-1]),
                    overrides=(f"{_ROLLOUT}.sync_proof.canary_freq=1",) if run.is_own else (),
                )
            ]
    return []


def _one_version_late(run: RunData) -> list[Statement]:
    """Row 19: the gap of a step follows the update before it, though samples are said to be fresh."""
    if any(value > 0 for name in _AGES for value in run.get(name).values):
        return []
    gap, moved = gap_size(run), run.get("actor/ppo_kl").by_step()
    pairs = [
        (nats_of_k3(2 * moved[previous]), value)
        for (previous, _), (step, value) in pairwise(zip(gap.steps, gap.values, strict=True))
        if previous in moved and step == previous + 1
    ]
    if len(pairs) < _FEWEST_FOR_LAG:
        return []
    # Differences: a trend that both share says nothing about which causes which.
    line = fit_line([b[0] - a[0] for a, b in pairwise(pairs)], [b[1] - a[1] for a, b in pairwise(pairs)])
    typical = math.fsum(value for _, value in pairs) / len(pairs)
    if (
        line is None
        or line.slope <= 0
        or line.r_squared <= LINEAR
        or typical < BOUNDS.above_floor * gap.values[0]
    ):
        return []
    return [
        cause_statement(
            table.ONE_VERSION_LATE,
            {"gap": typical, "first": gap.values[0], "r": line.r_squared, "slope": line.slope},
            confidence="likely",
            steps=(gap.steps[0], gap.steps[-1]),
        )
    ]


def _missed_update(run: RunData) -> list[Statement]:
    """Row 19 for single steps: the gap jumps, and is back as soon as the next weights arrive.

    Other weights change the logits of all tokens, so the mean gap jumps, too; rounding can make a few
    unlikely ones stand out in a step.
    """
    sizes = run.get(GAP)
    noise = run.get(f"{PREFIX}logit_noise") if run.has(f"{PREFIX}logit_noise") else sizes
    if len(noise) < FEWEST_FOR_TREND:
        return []
    usual_size = statistics.median(sizes.values or (0.0,))
    jumped = {step for step, size in sizes.by_step().items() if size > BOUNDS.above_floor * usual_size}
    first, usual = at_the_start(noise), statistics.median(noise.values)
    bound = BOUNDS.far_above_floor * first
    jumps = {
        step: value
        for step, value in noise.by_step().items()
        if value > bound and (step in jumped or not len(sizes))
    }
    if not jumps or len(jumps) > len(noise) * _MOST_JUMPS or usual > BOUNDS.above_floor * first:
        return []
    return [
        cause_statement(
            table.MISSED_UPDATE,
            {
                "first": first,
                "peak": max(jumps.values()),
                "count": len(jumps),
                "steps": len(noise),
                "step": min(jumps),
            },
            confidence="likely",
            steps=(min(jumps), max(jumps)),
        )
    ]


def _drift_within_the_step(run: RunData) -> list[Statement]:
    """Row 17: in bypass mode k3 is measured over all updates of a step, logit noise before the first update.

    Noise s on the logits makes log-ratios of s sqrt(g), and the mean of g over tokens is at most 1.
    """
    if not run.settings.get(f"{_CORRECTION}.bypass_mode"):
        return []
    noise = run.get(f"{PREFIX}logit_noise").by_step()
    k3_by_step = run.get(K3).by_step()
    moved = {step: nats_of_k3(2 * k3) for step, k3 in k3_by_step.items() if step in noise}
    drifts = Series.from_steps(
        {step: size if size > BOUNDS.above_floor * noise[step] else 0.0 for step, size in moved.items()}
    )
    drift = confirm(drifts, lambda size: size > BOUNDS.drift)
    if drift is None:
        return []
    first, last = drift.steps
    drifted = [(size, noise[step]) for step, size in moved.items() if first <= step <= last]
    epochs = run.settings.get("actor_rollout_ref.actor.ppo_epochs", 1)
    return [
        cause_statement(
            table.DRIFT,
            {
                "drift": statistics.median(size for size, _ in drifted),
                "noise": statistics.median(step_noise for _, step_noise in drifted),
                "count": drift.count,
                "steps": len(moved),
            },
            confidence="named",
            steps=drift.steps,
            overrides=("actor_rollout_ref.actor.ppo_epochs=1",) if run.is_own and int(epochs) > 1 else (),
        )
    ]


def _large_from_the_start(run: RunData) -> list[Statement]:
    """Row 20 for the first steps: more noise than rounding makes in the precision that is configured."""
    name = "logit_noise" if run.has(f"{PREFIX}logit_noise") else "logit_noise_least"
    noise, rounding = run.get(f"{PREFIX}{name}"), _rounding_noise(run)
    if len(noise) < _FEWEST_AT_START or rounding is None or _oldest(run) > 0:
        return []
    first = min(noise.values[:_FEWEST_AT_START])
    if first <= rounding.largest:
        return []
    return [
        cause_statement(
            table.LARGE,
            {"first": first, "plausible": rounding.plausible},
            sentence=f"Logit noise was {{first:.3f}} from the first step on, where rounding in "
            f"{rounding.precision} makes {{plausible:g}}: {_SOMETHING_ELSE}",
            next_test=table.LARGE.next_test if run.is_own else _COMPARE_INPUTS,
            confidence="possible",
            steps=(noise.steps[0], noise.steps[-1]),
        )
    ]


def _beyond_the_models_rounding(run: RunData) -> list[Statement]:
    """Row 20 for the first steps, where the trainer estimated what rounding makes in this model."""
    gap, rounding = run.get(GAP), run.get("sync/canary_rounding")
    if not gap or not rounding or _oldest(run) > 0:
        return []
    first, makes = min(gap.values[:_FEWEST_AT_START]), rounding.values[0]
    if first <= BOUNDS.far_above_floor * makes:
        return []
    return [
        cause_statement(
            table.BEYOND_ROUNDING,
            {"gap": first, "rounding": makes},
            sentence="The gap was {gap:.4f} nats per token (mean |log-ratio|) from the first step on, where "
            f"rounding makes {{rounding:.4f}} in this model: {_SOMETHING_ELSE}",
            next_test=table.LARGE.next_test,
            confidence="possible",
            steps=(gap.steps[0], gap.steps[-1]),
        )
    ]


def _beyond_rounding(run: RunData) -> list[Statement]:
    """Row 20 where the mean gap is larger than rounding makes, whatever it was at the start.

    Noise s on the logits makes log-ratios of at most s sqrt(E g) on average, and E g = 1 - E Q is at most
    1 - exp(-entropy): a policy that grows certain has more noise on its logits, and a smaller gap.
    """
    gap, rounding, entropies = run.get(GAP), _rounding_noise(run), run.get("actor/entropy").by_step()
    if rounding is None:
        return []
    pairs = {
        step: (size, rounding.largest * math.sqrt(-math.expm1(-max(entropies.get(step, math.inf), 0.0))))
        for step, size in gap.by_step().items()
    }
    excess = Series.from_steps({step: size - bound for step, (size, bound) in pairs.items()})
    beyond = confirm(excess, lambda nats: nats > 0)
    if beyond is None:
        return []
    first, last = beyond.steps
    sizes, bounds = zip(*(pairs[step] for step in pairs if first <= step <= last), strict=True)
    evidence = {"gap": statistics.median(sizes), "count": beyond.count, "steps": len(gap)}
    evidence |= {"largest": statistics.median(bounds), "age": _oldest(run)}
    age = "; tokens are up to {age:.0f} steps old, which may be it" if evidence["age"] > 0 else ""
    return [
        cause_statement(
            table.BEYOND_ROUNDING,
            evidence,
            sentence="The gap is {gap:.4f} nats per token (mean |log-ratio|), where rounding in "
            f"{rounding.precision} makes {{largest:.3f}} at most ({{count:.0f}} of {{steps:.0f}} steps): "
            f"{_SOMETHING_ELSE}{age}",
            next_test=table.LARGE.next_test if run.is_own else _COMPARE_INPUTS,
            level="notice" if age else "fault",
            confidence="possible",
            steps=beyond.steps,
        )
    ]


def _oldest(run: RunData) -> float:
    """The largest mean age of tokens in a step, in steps."""
    return max((value for name in _AGES for value in run.get(name).values), default=0.0)


@dataclass(frozen=True)
class _RoundingNoise:
    """The noise that rounding makes in the logits of a run."""

    precision: str
    plausible: float
    """Noise on the logits that was measured in small models."""
    largest: float
    """Beyond this, noise on the logits is called large."""


def _rounding_noise(run: RunData) -> _RoundingNoise | None:
    """The noise that the run's precision explains; None where a run of our own does not say its precision."""
    precision = _precision(run)
    if precision is None:
        most = BOUNDS.implausible_noise
        return None if run.is_own else _RoundingNoise("any precision", most, most)
    plausible = PLAUSIBLE_NOISE[precision]
    return _RoundingNoise(precision, plausible, BOUNDS.far_above_floor * plausible)


def _precision(run: RunData) -> str | None:
    """The least precise part of engine and trainer, a key of the plausible noises; None where neither the
    configuration nor the facts of token records tell."""
    keys = (f"{_ROLLOUT}.dtype", "actor_rollout_ref.actor.fsdp_config.dtype")
    dtypes = [run.settings.get(key) for key in keys]
    if not run.is_own and run.tokens is not None:
        dtypes = [run.tokens.facts.get(name) for name in ("engine_dtype", "trainer_dtype")]
    engine, trainer = (torch_name(str(dtype)) for dtype in dtypes)
    if not {engine, trainer} <= PLAUSIBLE_NOISE.keys():
        return None
    quantization, cache = (
        run.settings.get(f"{_ROLLOUT}.quantization"),
        run.settings.get(f"{_ROLLOUT}.kv_cache_dtype", "auto"),
    )
    return least_precise(engine, quantization, str(cache), trainer)


def _size_statement(run: RunData) -> Statement:
    """Rows 11 and 20: the gap is as at the start, or has grown by every measure, or much by one, or is beyond
    rounding.

    Where a policy grows certain, rounding moves into a few tokens: in 1,000 healthy steps sqrt(k3) doubled
    while the mean fell.
    """
    measures = measures_of_gap(run)
    grown = []
    for gap, unit in measures:
        # Before the first update no weights are old: samples of the second step may be.
        last, first = mean_of(last_tenth(gap)) if len(gap) >= FEWEST_FOR_TREND else None, min(gap.values[:2])
        # A gap of 0 has not grown where it is what float32 rounds.
        floor = BOUNDS.above_floor * max(first, PLAUSIBLE_NOISE["float32"])
        if last is not None and last.value - last.error > floor:
            grown.append(_grown({"first": first, "gap": last.value}, unit, last.steps))
    if not measures:
        return _not_measured(run)
    worst = min(
        grown, key=lambda statement: statement.evidence["first"] / statement.evidence["gap"], default=None
    )
    if worst is not None and (len(grown) == len(measures) or worst.level == "fault"):
        return worst
    beyond = [*_beyond_the_models_rounding(run), *_beyond_rounding(run)]
    return beyond[0] if beyond else _rounding_statement(*measures[0])


def _grown(evidence: dict[str, float], unit: str, steps: tuple[int, int]) -> Statement:
    return cause_statement(
        table.GROWN,
        evidence,
        sentence=f"The gap has grown from {{first:.4f}} to {{gap:.4f}} {unit}; ages, updates and missing "
        "mass do not explain it",
        level="fault" if evidence["gap"] > BOUNDS.far_above_floor * evidence["first"] else "notice",
        confidence="possible",
        steps=steps,
    )


def _rounding_statement(gap: Series, unit: str) -> Statement:
    last = mean_of(last_tenth(gap))
    assert last is not None, "a gap that was measured has a last value"
    evidence = {"gap": last.value, "first": at_the_start(gap)}
    template = f"The gap is {{gap:.4f}} {unit}"
    if last.interval is not None:
        evidence["low"], evidence["high"] = last.interval
        template += ", {low:.4f} to {high:.4f}"
    template += "; {first:.4f} at the start" if len(gap) > 2 else ""
    return cause_statement(
        table.ROUNDING,
        evidence,
        sentence=template + ": rounding of the engine, as far as metrics tell",
        steps=last.steps,
    )


def _not_measured(run: RunData) -> Statement:
    if run.is_own:
        how = "diagnostics are part of every run with updates"
    elif run.tokens is not None:
        how = "its token records lack the trainer's (old_log_prob)"
    else:
        how = f"verl: {_ROLLOUT}.calculate_log_probs=True records it"
    return filled_statement(
        "gap",
        "not measured",
        "unknown",
        f"The gap cannot be told: no log-probs of the engine were compared; {how}",
        {},
    )


def checked_rules(run: RunData) -> tuple[str, ...]:
    """The subjects that the rules of this module have checked, in words."""
    names = dict.fromkeys(row.cause for row in signature_rows(run) if row.is_asked)
    return (
        "log-probs that are not finite",
        *(names or ("missing mass (sampling filters, banned tokens, log-probs of other tokens)",)),
        *(("updates that rounding takes away",) if run.has(_SURVIVAL) else ()),
        "growth with the age of tokens",
        "weights that never arrive or arrive late",
        "growth over the run",
    )


def invisible_causes(run: RunData) -> str:
    """Causes that no metric of the run shows, in words."""
    signatures = "" if has_signatures(run) else "another temperature on both sides, raw log-probs, "
    return f"{signatures}an old prefix cache, padding, templates: these need the tokens' own log-probs"
