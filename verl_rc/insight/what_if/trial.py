"""Trying presets on a recorded batch: the table, and the preset that is recommended.

None is recommended where the verdict names a fault that no preset repairs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_rc.config.algorithms import POLICY_LOSSES, RatioOptions
from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig, fields_from_text
from verl_rc.health.cause_table import CAUSES
from verl_rc.insight.verdict import Verdict
from verl_rc.insight.what_if.batch import RecordedBatch
from verl_rc.insight.what_if.estimate import (
    DRAWS,
    SEED,
    Estimate,
    Interval,
    Updates,
    bias_updates,
    estimate_presets,
    reference_level,
)
from verl_rc.ppo.choices import needs_statistics_first

FEWEST_PROMPTS = 32
_SMALLEST_BATCH = 0.5
_LEVELS: Sequence[str | None] = (None, "token", "prefix", "turn", "sequence", "geometric")
BY_TURN = "rollout_is=turn"
"""The name of weights by turn, which no preset has."""
_PRINTED_COLUMNS = (
    "effective_batch",
    "ess_rows",
    "clipped",
    "rejected_tokens",
    "rejected_rows",
    "norm",
    "cosine",
    "bias",
    "noise",
    "error",
)


@dataclass(frozen=True)
class PresetTrial:
    """The result of ``verl-rc what-if``."""

    estimates: tuple[Estimate, ...]
    recommended: str | None
    """None: a fault forbids it, or the records do not suffice."""
    reasons: tuple[str, ...]
    """Why, one sentence each."""
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The table and the reasons, for the console."""
        head = ["preset", *_PRINTED_COLUMNS, "forwards"]
        rows = [
            [
                estimate.name,
                *(_interval_text(estimate.columns[name]) for name in _PRINTED_COLUMNS),
                str(extra_forwards(estimate.config)),
            ]
            for estimate in self.estimates
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        ]
        recommendation = (
            f"recommended: {self.recommended}" if self.recommended else "no preset is recommended"
        )
        return [*table, "", *self.notes, recommendation, *(f"  {reason}" for reason in self.reasons)]

    def as_json(self) -> dict[str, Any]:
        """For machines; numbers that are not finite are None."""
        return {
            "recommended": self.recommended,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "seed": SEED,
            "draws": DRAWS,
            "presets": {
                estimate.name: {name: _numbers(column) for name, column in estimate.columns.items()}
                | {"forwards": extra_forwards(estimate.config)}
                for estimate in self.estimates
            },
        }


def tried_configs(presets: str | None, fields: Sequence[str]) -> dict[str, RolloutCorrectionConfig]:
    """Corrections by name.

    Args:
        presets: names separated by commas; None: all current presets.
        fields: ``KEY=VALUE`` of a further correction, which is called ``given``.

    Raises:
        ValueError: a name is no preset, or a field is none of a correction.
    """
    current_origin = PRESETS["disabled"].origin
    current_presets = [name for name, preset in PRESETS.items() if preset.origin == current_origin]
    names = current_presets if presets is None else presets.split(",")
    configs = {name: RolloutCorrectionConfig.from_preset(name) for name in names}
    pairs = [field.partition("=") for field in fields]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError(f"--set must be given KEY=VALUE, got {', '.join(fields)}.")
    if pairs:
        values = fields_from_text({key: text for key, _, text in pairs})
        configs["given"] = RolloutCorrectionConfig.model_validate(values)
    return configs


def with_turns(
    configs: Mapping[str, RolloutCorrectionConfig], batch: RecordedBatch
) -> dict[str, RolloutCorrectionConfig]:
    """``configs``, and weights by turn where rows of the batch have several turns."""
    by_turn = RolloutCorrectionConfig(rollout_is="turn")
    return {**configs, BY_TURN: by_turn} if batch.has_turns else dict(configs)


def _require_turns(batch: RecordedBatch, configs: Mapping[str, RolloutCorrectionConfig]) -> None:
    """Raise ``ValueError`` when turns are to be corrected and the records do not tell them apart."""
    by_turn = [
        name
        for name, config in configs.items()
        if config.rollout_is == "turn" or any(rule.startswith("turn_") for rule in config.rejection_bounds())
    ]
    if by_turn and not batch.has_turns:
        raise ValueError(
            f"{', '.join(by_turn)}: to correct turns some row must have several, but response_mask of the "
            "records marks one run of sampled tokens in every row; take rollout_is=sequence, which is the "
            "same there, or record a run with tools or an environment."
        )


def try_presets(
    batch: RecordedBatch,
    presets: Mapping[str, RolloutCorrectionConfig],
    verdict: Verdict | None = None,
    batch_size: int | None = None,
    updates: Updates = bias_updates,
) -> PresetTrial:
    """Try all presets, and recommend the simplest one that is as good as the best. ``updates`` computes the
    updates that they are judged by."""
    _require_turns(batch, presets)
    estimates = tuple(estimate_presets(batch, presets, batch_size, updates=updates))
    notes = list(_notes(batch, updates is bias_updates))
    faults = [
        statement
        for statement in (() if verdict is None else verdict.statements)
        if (statement.topic, statement.level) == ("gap", "fault")
        and not CAUSES[statement.cause].is_repairable
    ]
    if faults:
        reasons = [f"{fault.cause}: no preset repairs this. {fault.next_test}".strip() for fault in faults]
        return PresetTrial(estimates, None, tuple(reasons), tuple(notes))
    recommended, reasons = recommend(estimates)
    return PresetTrial(estimates, recommended, tuple(reasons), tuple(notes))


def recommend(estimates: Sequence[Estimate]) -> tuple[str | None, list[str]]:
    """The simplest preset whose error is not above the smallest in most draws, and a reason for each simpler
    one that is not."""
    candidates = [
        estimate for estimate in estimates if estimate.columns["effective_batch"].value > _SMALLEST_BATCH
    ]
    if not candidates:
        return None, ["Weights and rejection leave less than half of the batch with every one of them."]
    if not all(math.isfinite(estimate.columns["error"].value) for estimate in candidates):
        return None, ["Errors cannot be told: they need two prompts or more, and advantages that are not 0."]
    best = min(candidates, key=lambda estimate: estimate.columns["error"].value)
    reasons = []
    for estimate in sorted(estimates, key=_complexity):
        if estimate not in candidates:
            reasons.append(
                f"{estimate.name}: weights and rejection leave "
                f"{estimate.columns['effective_batch'].value:.0%} of the batch."
            )
        elif _is_mostly_above(estimate, best):
            reasons.append(
                f"{estimate.name}: its update is further from the reference (error "
                f"{estimate.columns['error'].value:.3g}, {best.name} {best.columns['error'].value:.3g})."
            )
        else:
            smallest = f"the smallest ({best.columns['error'].value:.3g}) in most draws"
            reasons.append(f"{estimate.name}: the simplest whose error is not above {smallest}.")
            return estimate.name, reasons
    raise AssertionError("the best one is not above itself")


def _is_mostly_above(estimate: Estimate, best: Estimate) -> bool:
    """Whether the error is above the best one's in more than half of the draws, which are the same for both.

    With 95 % of the draws, too little correction was recommended from the few rows that a run records
    (docs/evidence.md, bill).
    """
    differences = estimate.error_draws[1:] - best.error_draws[1:]
    differences = differences[differences.isfinite()]
    return bool(len(differences)) and float((differences > 0).double().mean()) > 0.5


def _complexity(estimate: Estimate) -> tuple[int, int, int, bool, str]:
    """Sort key: rejection rules, then bounds on both sides, then the level of the weights.

    A loss with its own ratio to the rollout policy counts as weights: of sequences for a product, else of
    tokens.
    """
    config = estimate.config
    fields = config.effective_fields()
    rules = ("rollout_rs", "rollout_token_veto_threshold", "rollout_opsm_threshold")
    num_rules = sum(bool(fields.get(name)) for name in rules)
    has_band = config.rollout_is is not None and "_" in str(config.rollout_is_threshold)
    level = config.rollout_is
    if not config.applies_weights:
        ratio = POLICY_LOSSES[config.named_loss or "vanilla"].ratio
        level = "sequence" if ratio == "product" else "token"
    return num_rules, int(has_band), _LEVELS.index(level), config.bypass_mode, estimate.name


def extra_forwards(config: RolloutCorrectionConfig) -> int:
    """Passes over the batch without gradient that the correction needs beside the update itself."""
    return int(not config.in_actor) + int(config.in_actor and needs_statistics_first(config))


def _notes(batch: RecordedBatch, has_bias_updates: bool) -> list[str]:
    rows, prompts = len(batch.mask), batch.num_prompts
    notes = [
        *batch.notes,
        f"{rows:,} random rows of {prompts:,} prompts; 90 % intervals over prompts, {DRAWS} draws, seed "
        f"{SEED}.",
    ]
    if prompts < FEWEST_PROMPTS:
        notes.append(
            f"Too few prompts: {FEWEST_PROMPTS} are needed for intervals that hold; "
            "trainer.token_records.full_freq records whole steps."
        )
    if reference_level(batch) == "token":
        notes.append(
            "The reference has token weights: sequence weights have too heavy a tail here (less than half of "
            "the sample is kept, or one row has a twentieth of the sum of squares)."
        )
    if has_bias_updates and not batch.has_gradients:
        notes.append(
            "Norm and cosine count every token alike: algorithm.rollout_correction.diagnostics=full records "
            "how much each moves."
        )
    if has_bias_updates:
        notes.append(
            "Bias, noise and error are of the part of the update that moves the biases of sampled tokens."
        )
    notes.append(f"Bypass presets are judged at their first update, {_clip_text(batch.clip)}.")
    return notes


def _clip_text(clip: RatioOptions | None) -> str:
    below, above = (clip or RatioOptions()).clip_bounds
    bounds = f"clipped to {1 - below:g} to {1 + above:g}"
    return f"{bounds} as in the run" if clip else f"{bounds}, the default: the run's files do not say"


def _interval_text(interval: Interval) -> str:
    if not math.isfinite(interval.value):
        return "-"
    value = f"{interval.value:.3g}"
    if not math.isfinite(interval.low) or interval.low == interval.high:
        return value
    return f"{value} ({interval.low:.3g} to {interval.high:.3g})"


def _numbers(interval: Interval) -> dict[str, float | None]:
    values = {"value": interval.value, "low": interval.low, "high": interval.high}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
