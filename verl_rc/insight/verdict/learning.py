"""The learning of a run: reward and validation, and the usual ways in which they go wrong."""

import math
import re
from collections.abc import Callable

from verl_rc.algorithm.health.statement import Statement, filled_statement, literal
from verl_rc.insight.run_folder import RunData, Series
from verl_rc.insight.verdict.estimates import (
    FEWEST_FOR_TREND,
    Change,
    change_of,
    last_tenth,
    mean_of,
    running_mean,
)
from verl_rc.metrics.best_of_n import unbiased_std
from verl_rc.metrics.catalog import describe

_SCORE = "critic/score/mean"
_VALIDATION = re.compile(r"val-core/(.+)/(acc|reward)/mean@\d+")
_ACTOR = "actor_rollout_ref.actor"

COLLAPSE = 0.5
"""Share of the best level that must be lost, beyond four standard errors: what the alert of a run means by a
collapse."""
_STANDARD_ERRORS = 4.0
ENTROPY_LOST = 0.1
"""Entropy that is left, of the first tenth's, below which the policy has collapsed onto few answers."""
CUT_OFF = 0.3
"""Share of responses at the length limit above which rewards say more about the limit than about answers."""
_CLIP_HIGHER = 0.28
LONGER = 1.5
"""Times the first length, from which on a reward that rises may be a reward for length."""
_SIZES_OF_UPDATES = {"actor/ppo_kl": "ppo_kl", "actor/pg_clipfrac": "clipped share"}
"""Metrics that leave their healthy range upwards where updates are too large, in words."""


def learning_statements(run: RunData) -> list[Statement]:
    """Statements about what went wrong, most telling first, or one about the reward if nothing did."""
    rules: tuple[Callable[[RunData], list[Statement]], ...] = (
        _not_finite,
        _collapse,
        _cut_off,
        _length_for_reward,
        _no_entropy,
    )
    return [statement for rule in rules for statement in rule(run)] or [_progress(run)]


def headline_validation(run: RunData) -> dict[tuple[str, str], Series]:
    """Validation by data source and variable, ``acc`` or ``reward``."""
    return {
        (match[1], match[2]): series
        for name, series in run.matching("val-core/")
        if (match := _VALIDATION.fullmatch(name))
    }


def source_validation(run: RunData) -> list[tuple[str, Series]]:
    """One validation of each data source, accuracy where it was logged; the name has source and variable."""
    sources: dict[str, tuple[str, Series]] = {}
    for (source, variable), series in headline_validation(run).items():
        if variable == "acc" or source not in sources:
            sources[source] = (f"{source} {variable}", series)
    return [sources[source] for source in sorted(sources)]


def _not_finite(run: RunData) -> list[Statement]:
    bad = [
        step
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/grad_norm")
        if name in run.series
        for step, value in run.series[name].by_step().items()
        if not math.isfinite(value)
    ]
    skipped = run.get("actor/nonfinite_gradients").by_step()
    bad += [step for step, value in skipped.items() if value > 0]
    if not bad:
        return []
    return [
        filled_statement(
            "learning",
            "gradients not finite",
            "fault",
            "Loss or gradient is NaN or infinite in {count:.0f} of {steps:.0f} steps",
            {"count": len(set(bad)), "steps": len(run.steps)},
            confidence="named" if len(set(bad)) > 1 else "likely",
            steps=(min(bad), max(bad)),
            next_test="Look at log-probs and rewards of the first such step; learn more slowly if the "
            "gradient grew before.",
            overrides=_smaller_rate(run),
        )
    ]


def _collapse(run: RunData) -> list[Statement]:
    """The reward fell by half of its best level; with a hint at what came before it."""
    score = run.get(_SCORE)
    if len(score) < FEWEST_FOR_TREND:
        return []
    width = max(3, len(score) // 10)
    means = running_mean(score.values, width)[width - 1 :]
    best, last = max(means), means[-1]
    best_at = means.index(best)
    spread = unbiased_std(score.values[best_at : best_at + width]) + unbiased_std(score.values[-width:])
    bound = max(COLLAPSE * abs(best), _STANDARD_ERRORS * spread / math.sqrt(width))
    if best - last <= bound or best_at + width > len(score) - width:
        return []
    evidence = {"best": best, "last": last, "best_step": score.steps[best_at + width - 1]}
    why, overrides = _too_large_updates(run, evidence)
    return [
        filled_statement(
            "learning",
            "collapse" + (": updates too large" if why else ""),
            "fault",
            "The reward collapsed: {best:.3g} around step {best_step:.0f}, {last:.3g} at the end" + why,
            evidence,
            confidence="named" if why else "likely",
            steps=(int(evidence["best_step"]), score.steps[-1]),
            next_test="Go on from a checkpoint before the fall with smaller updates."
            if why
            else "Read samples before and after the fall, and the gap's verdict: learning from wrong ratios "
            "ends like this.",
            overrides=overrides,
        )
    ]


def _too_large_updates(run: RunData, evidence: dict[str, float]) -> tuple[str, tuple[str, ...]]:
    """Signs of updates that were too large, in words, and what to set; nothing where there is none."""
    signs = []
    for name, word in _SIZES_OF_UPDATES.items():
        largest = max(run.get(name).values, default=0.0)
        if largest > describe(name).highest_healthy:
            key = word.replace(" ", "_")
            evidence[key] = largest
            signs.append(f"{word} up to {{{key}:.2g}}")
    if not signs:
        return "", ()
    return f"; {' and '.join(signs)}: updates were too large", _smaller_rate(run)


def _smaller_rate(run: RunData) -> tuple[str, ...]:
    """A third of the largest learning rate; nothing where none was logged."""
    largest = max(run.get("actor/lr").values, default=0.0)
    return (f"{_ACTOR}.optim.lr={largest / 3:.1g}",) if largest > 0 else ()


def _cut_off(run: RunData) -> list[Statement]:
    """Many responses end at the limit, and more than before."""
    share = run.get("response_length/clip_ratio")
    change, last = change_of(share), mean_of(last_tenth(share))
    if last is None or last.value <= CUT_OFF or (change is not None and change.difference <= 0):
        return []
    limit = run.settings.get("data.max_response_length")
    grown = ", after {first:.0%} at first" if change is not None and change.is_clear else ""
    return [
        filled_statement(
            "learning",
            "responses cut off",
            "fault" if change is not None and change.is_clear else "notice",
            "{share:.0%} of the responses reach the length limit"
            + grown
            + ": rewards tell about the limit, not the answer",
            {"share": last.value, "first": last.value if change is None else change.first.value},
            confidence="named" if last.count > 1 else "likely",
            steps=last.steps,
            next_test="Read the longest samples: thoughts that go on need a larger limit, repetition needs a "
            "penalty for length.",
            overrides=(f"data.max_response_length={2 * limit}",) if isinstance(limit, int) else (),
        )
    ]


def _length_for_reward(run: RunData) -> list[Statement]:
    """The training reward rises with the length, and validation falls."""
    score, length = change_of(run.get(_SCORE)), change_of(run.get("response_length/mean"))
    falls = [
        change
        for _, series in source_validation(run)
        if (change := _ends(series)) is not None and change.difference < 0
    ]
    if score is None or length is None or not falls or not score.is_clear or score.difference <= 0:
        return []
    if length.first.value <= 0 or length.last.value < LONGER * length.first.value:
        return []
    return [
        filled_statement(
            "learning",
            "reward for length",
            "fault",
            "The training reward rose by {score:.3g} while validation fell from {before:.3g} to {after:.3g} "
            "and responses became {longer:.1f} times as long: the reward can be had by length",
            {
                "score": score.difference,
                "longer": length.last.value / length.first.value,
                "before": falls[0].first.value,
                "after": falls[0].last.value,
            },
            confidence="likely",
            steps=(run.steps[0], run.steps[-1]),
            next_test="Read the samples with the highest reward; score them by hand, or without the part "
            "that grows with length.",
        )
    ]


def _ends(series: Series) -> Change | None:
    """First and last validation: there are too few of them for tenths."""
    first, last = (
        mean_of(Series(series.steps[:1], series.values[:1])),
        mean_of(Series(series.steps[-1:], series.values[-1:])),
    )
    return Change(first, last) if first is not None and last is not None and len(series) > 1 else None


def _no_entropy(run: RunData) -> list[Statement]:
    """The policy gives the same answers again and again, and does not get better."""
    name = "actor/entropy" if run.has("actor/entropy") else "actor/update_entropy"
    entropy, score = change_of(run.get(name)), change_of(run.get(_SCORE))
    if entropy is None or entropy.first.value <= 0 or entropy.last.value > ENTROPY_LOST * entropy.first.value:
        return []
    if score is None or (score.difference > 0 and score.is_clear):
        return []
    return [
        filled_statement(
            "learning",
            "entropy lost",
            "fault",
            "Entropy fell from {first:.3g} to {last:.3g} nats and the reward does not rise: the policy no "
            "longer explores",
            {"first": entropy.first.value, "last": entropy.last.value},
            confidence="named",
            steps=entropy.last.steps,
            next_test="Raise the upper clip bound, or go on from an earlier checkpoint with more samples a "
            "prompt.",
            overrides=_higher_clip(run),
        )
    ]


def _higher_clip(run: RunData) -> tuple[str, ...]:
    """DAPO's upper bound of the clip; nothing where the run's is as high."""
    key = f"{_ACTOR}.clip_ratio_high"
    return (f"{key}={_CLIP_HIGHER}",) if (run.settings.get(key) or 0.0) < _CLIP_HIGHER else ()


def _progress(run: RunData) -> Statement:
    """Validation first to last; the reward's change, with its interval."""
    parts: list[str] = []
    evidence: dict[str, float] = {}
    improved = None
    for number, (name, series) in enumerate(source_validation(run)[:2], start=1):
        ends = _ends(series)
        if ends is not None:
            evidence |= {
                f"validation_{number}_first": ends.first.value,
                f"validation_{number}_last": ends.last.value,
            }
            parts.append(
                f"validation {literal(name)} {{validation_{number}_first:.3f}} to "
                f"{{validation_{number}_last:.3f}}"
            )
            improved = ends.difference > 0 if improved is None else improved
        else:
            evidence[f"validation_{number}"] = series.values[-1]
            parts.append(f"validation {literal(name)} {{validation_{number}:.3f}}, once")
    score = run.get(_SCORE)
    change, steps = change_of(score), None
    if change is not None:
        evidence |= {
            "first": change.first.value,
            "last": change.last.value,
            "change": change.difference,
            "error": change.error,
        }
        parts.append("reward {first:.3g} to {last:.3g} ({change:+.3g} ± {error:.2g})")
        improved = change.difference > 0 and change.is_clear if improved is None else improved
        steps = (score.steps[0], score.steps[-1])
    elif (mean := mean_of(score)) is not None:
        evidence["mean"], steps = mean.value, mean.steps
        parts.append("reward {mean:.3g}, too few steps for a trend")
    if not parts:
        return filled_statement(
            "learning",
            "not measured",
            "unknown",
            "Learning cannot be told: no reward and no validation was logged",
            {},
        )
    cause = "learns" if improved else "no trend" if improved is None else "does not improve"
    lead = {"learns": "It learns: ", "no trend": "", "does not improve": "It does not improve: "}[cause]
    sentence = lead + ", ".join(parts)
    if cause != "does not improve":
        return filled_statement("learning", cause, "good", sentence, evidence, steps=steps)
    test = "Look at the share of prompts whose samples differ in reward: without any there is no gradient."
    return filled_statement("learning", cause, "notice", sentence, evidence, steps=steps, next_test=test)
