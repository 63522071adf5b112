"""Configuration of rollout correction: importance weights, rejection, and how they enter the loss."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

from verl_rc.config.errors import nearest_key, shortened
from verl_rc.config.rejection_rules import (
    REJECTION_RULES,
    BoundedRule,
    RejectionRule,
    Threshold,
    parse_rules,
    parse_threshold,
    threshold_specs,
)
from verl_rc.config.rollout_correction_legacy import import_legacy
from verl_rc.config.rollout_correction_presets import PRESETS, PresetConstructors, preset_fields
from verl_rc.config.schema import StrictModel

__all__ = [
    "PRESETS",
    "REJECTION_RULES",
    "WEIGHT_LEVELS",
    "CorrectionSettings",
    "RolloutCorrectionConfig",
    "WeightSettings",
    "preset_fields",
]

_SECTION = "algorithm.rollout_correction"
WeightLevel = Literal["token", "prefix", "turn", "sequence", "geometric"]
"""The level of a weight: see ``RolloutCorrectionConfig.rollout_is``."""
WEIGHT_LEVELS: tuple[WeightLevel, ...] = get_args(WeightLevel)
RejectionDenominator = Literal["original", "kept"]
"""The denominator of a loss: see ``RolloutCorrectionConfig.rejection_denominator``."""

ThresholdInput = float | str | dict[str, float] | list[Any] | None
"""A threshold as a user may write it; kept as a number or as text."""


@dataclass(frozen=True)
class WeightSettings:
    """The level of importance weights, and their bounds."""

    level: WeightLevel
    threshold: Threshold
    """A band, or only the bound that larger weights are truncated to."""
    batch_normalize: bool

    @property
    def is_per_row(self) -> bool:
        """Whether all tokens of a row share one weight."""
        return self.level in ("sequence", "geometric")


CorrectionMode = Literal["decoupled", "bypass", "interpolated"]
"""The policy that is corrected against the rollout policy, and the place: the proximal policy in the driver,
before the update; the current policy, or a proximal one interpolated from both, in the actor, during it."""


@dataclass(frozen=True)
class CorrectionSettings:
    """The options that ``verl_rc.correction`` computes with, as typed values without short forms."""

    weights: WeightSettings | None
    rules: tuple[BoundedRule, ...]
    """Rejection rules in the order given."""
    log_veto: float | None
    """Log-ratio below which a single token gets its whole row rejected."""
    opsm_threshold: float | None
    """Mean of rollout less train log-probs, in nats, above which a row's tokens with negative advantages are
    rejected."""
    nonfinite: Literal["reject_sequence", "reject_token", "neutral"]
    """Treatment of a token whose log-prob is NaN or infinite; ``raise`` rejects its row until the run stops.
    """
    full: bool
    """Whether the diagnostics beyond verl's are measured."""
    tests_misalignment: bool
    """Whether train and rollout policy hold the same weights but for a lag, so that ratios must have mean 1.
    """

    @property
    def rejects(self) -> bool:
        """Whether anything can reject tokens whose log-probs are finite."""
        return bool(self.rules) or self.log_veto is not None or self.opsm_threshold is not None


class ScoreCenteringConfig(StrictModel):
    """``algorithm.rollout_correction.score_centering``: the loss of a token less the sampler's expectation of
    it at that place (arXiv:2609.20807)."""

    enabled: bool = False
    """Whether the loss is centered."""
    top_k: int = Field(32, ge=1)
    """Most likely tokens whose log-probs the engine reports at each place."""
    tail: Literal["proportional", "none"] = "proportional"
    """All other tokens: the sampler is assumed proportional to the trained policy, or they are left out."""


class RolloutCorrectionConfig(PresetConstructors):
    """``algorithm.rollout_correction.*``. The default measures the gap and corrects nothing.

    Ratios are train over rollout: the proximal policy over the rollout policy, or the current one in bypass
    mode.
    """

    rollout_is: WeightLevel | None = None
    """Importance weight of a token: its ratio (token), the product of those up to it (prefix), of its turn
    (turn) or of its row (sequence), or their geometric mean (geometric); null: no weights."""
    rollout_is_threshold: ThresholdInput = 2.0
    """A number: larger weights are truncated to it. A band (``0.5_5.0`` or ``{lower, upper}``): weights
    outside become 0."""
    rollout_is_batch_normalize: bool = False
    """Divide the truncated weights by their mean over the batch's tokens, or rows where a row has one weight.
    """
    rollout_rs: str | list[str] | None = None
    """Rejection rules, a list or comma-separated; what fails one is left out of the policy loss. null: none.
    """
    rollout_rs_threshold: ThresholdInput = None
    """One threshold for all rules, or one for each: bounds on the ratio for k1 rules (u means 1/u to u), an
    upper bound on the statistic for others."""
    rollout_rs_target_acceptance: float | None = Field(None, gt=0, lt=1, allow_inf_nan=False)
    """Share of tokens or rows that a single k1 rule shall accept, by a threshold that follows the batches.
    Needs ``diagnostics=full``. null: fixed thresholds."""
    rollout_token_veto_threshold: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    """Ratio of a single token below which its row is rejected; null: no veto."""
    rollout_opsm_threshold: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Off-policy sequence masking: mean log-ratio rollout/train of a row, nats, above which its tokens with a
    negative advantage are rejected; null: none."""
    bypass_mode: bool = False
    """Two policies instead of three: the rollout policy replaces the proximal policy."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """Log-probs of the proximal policy: recomputed or, in asynchronous runs, interpolated between rollout and
    current log-probs."""
    loss_type: Literal["ppo_clip", "reinforce", "topr"] = "ppo_clip"
    """Loss of bypass mode: ``policy_loss.loss_mode`` without weights (ppo_clip), the policy gradient with
    weights (reinforce), or TOPR without weights (topr)."""
    rejection_denominator: RejectionDenominator = "original"
    """What a loss is divided by: all response tokens, or the kept ones."""
    rejected_in_group_baseline: Literal["include", "exclude"] = "include"
    """Whether fully rejected rows count in their group's baseline. With ``exclude``, a row left alone in its
    group gets the advantage 0."""
    nonfinite_logprob: Literal["reject_sequence", "reject_token", "neutral", "raise"] = "reject_sequence"
    """Treatment of a token whose log-prob is NaN or infinite: reject its row, reject the token, take its
    ratio as 1, or stop the run."""
    nonfinite_stop_fraction: float = Field(0.01, ge=0, le=1, allow_inf_nan=False)
    """Share of response tokens without a finite log-prob above which the run stops."""
    scale_lr_by_ess: Literal["sqrt", "linear"] | None = None
    """Multiply the actor's learning rate by the effective sample size of the weights before rejection, as a
    share (linear), or by its square root (sqrt, for AdamW); null: no. VCPO, arXiv:2602.17616."""
    score_centering: ScoreCenteringConfig = ScoreCenteringConfig()
    """Score centering, beside weights and rejection or alone."""
    diagnostics: Literal["core", "full"] = "full"
    """core: verl's metrics. full: also percentiles, raw weights, effective sample sizes, and signatures of
    what makes engine and trainer differ."""

    @field_validator("rollout_is", mode="before")
    @classmethod
    def _known_level(cls, value: object) -> object:
        if isinstance(value, str) and value not in WEIGHT_LEVELS:
            raise ValueError(
                f"{_SECTION}.rollout_is must be one of {', '.join(WEIGHT_LEVELS)} or null; got "
                f"{shortened(repr(value))}, did you mean {nearest_key(value, WEIGHT_LEVELS)}?"
            )
        return value

    @field_validator("rollout_is_threshold", mode="before")
    @classmethod
    def _canonical_weight_threshold(cls, value: object) -> object:
        if value is None:
            return None
        return _as_number_or_text(parse_threshold(value, f"{_SECTION}.rollout_is_threshold"))

    @field_validator("rollout_rs", mode="before")
    @classmethod
    def _canonical_rules(cls, value: object) -> object:
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        if not isinstance(text, str):
            return text
        return ",".join(rule.name for rule in parse_rules(text, f"{_SECTION}.rollout_rs"))

    @field_validator("rollout_rs_threshold", mode="before")
    @classmethod
    def _canonical_rejection_thresholds(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return None
        if _is_one_band(value, info.data.get("rollout_rs")):
            value = [value]
        specs = [parse_threshold(spec, f"{_SECTION}.rollout_rs_threshold") for spec in threshold_specs(value)]
        return _as_number_or_text(specs[0]) if len(specs) == 1 else ",".join(map(str, specs))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rollout_is is not None and self.rollout_is_threshold is None:
            raise ValueError(
                f"{_SECTION}.rollout_is={self.rollout_is} needs {_SECTION}.rollout_is_threshold, got null; "
                "pass a number such as 2.0 or a band such as 0.5_5.0"
            )
        if self.rollout_is is None and self.rollout_is_batch_normalize:
            raise ValueError(
                f"{_SECTION}.rollout_is_batch_normalize=True needs weights to normalise; pass "
                f"{_SECTION}.rollout_is=token or drop it"
            )
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        if self.rollout_is is None and self.rollout_is_threshold != defaults["rollout_is_threshold"]:
            raise ValueError(
                f"{_SECTION}.rollout_is_threshold={self.rollout_is_threshold} bounds nothing: "
                f"{_SECTION}.rollout_is is null; pass rollout_is=token or another level, or drop it"
            )
        allowed = self.nonfinite_stop_fraction
        if self.nonfinite_logprob == "raise" and allowed != defaults["nonfinite_stop_fraction"]:
            raise ValueError(
                f"{_SECTION}.nonfinite_stop_fraction={allowed} is never read with "
                f"{_SECTION}.nonfinite_logprob=raise, which allows no token at all; drop one of them"
            )
        self.rejection_bounds()
        self._check_modes()
        self._check_learning_rate()
        return self

    def _check_modes(self) -> None:
        if self.rollout_is_batch_normalize and not self.applies_weights:
            raise ValueError(
                f"{_SECTION}.rollout_is_batch_normalize=True scales nothing with loss_type={self.loss_type} "
                "in bypass mode, whose loss takes no weights; pass loss_type=reinforce or drop it"
            )
        if self.named_loss is not None and not self.bypass_mode:
            raise ValueError(
                f"{_SECTION}.loss_type={self.loss_type} is a loss of bypass mode; pass "
                f"{_SECTION}.bypass_mode=True or drop it"
            )
        if self.proximal == "interpolate" and self.bypass_mode:
            raise ValueError(
                f"{_SECTION}.proximal=interpolate needs three policies, and {_SECTION}.bypass_mode=True has "
                "no proximal one; drop one of them"
            )
        self._check_target_acceptance()
        if self.score_centering.enabled and self.rollout_is_batch_normalize:
            raise ValueError(
                f"{_SECTION}.score_centering.enabled=True cannot go with "
                f"{_SECTION}.rollout_is_batch_normalize=True: tokens that were not sampled have weights, "
                "too, but no mean over the batch; drop one of them"
            )
        off = ScoreCenteringConfig()
        if not self.score_centering.enabled and self.score_centering != off:
            raise ValueError(
                f"{_SECTION}.score_centering: top_k={self.score_centering.top_k} and "
                f"tail={self.score_centering.tail} center nothing: enabled is False; pass "
                f"{_SECTION}.score_centering.enabled=True or drop them"
            )
        if self.rejection_denominator == "kept" and not self.rejects:
            raise ValueError(
                f"{_SECTION}.rejection_denominator=kept needs a rejection rule; got rollout_rs=null and no "
                f"veto, pass {_SECTION}.rollout_rs or drop it"
            )
        if self.rejected_in_group_baseline == "exclude" and self.rollout_opsm_threshold is not None:
            raise ValueError(
                f"{_SECTION}.rejected_in_group_baseline=exclude cannot go with "
                f"{_SECTION}.rollout_opsm_threshold, which looks at advantages that the baseline decides; "
                "pass rejected_in_group_baseline=include"
            )
        if self.rejected_in_group_baseline == "exclude" and (self.bypass_mode or not self.rejects):
            raise ValueError(
                f"{_SECTION}.rejected_in_group_baseline=exclude needs decoupled mode and a rejection rule; "
                f"got bypass_mode={self.bypass_mode} and rollout_rs={self.rollout_rs}; pass "
                "rejected_in_group_baseline=include"
            )
        if self.rejected_in_group_baseline == "exclude" and self.proximal == "interpolate":
            raise ValueError(
                f"{_SECTION}.rejected_in_group_baseline=exclude needs to know what is rejected before the "
                f"update, which {_SECTION}.proximal=interpolate finds out in it; pass proximal=recompute, or "
                "rejected_in_group_baseline=include"
            )

    def _check_learning_rate(self) -> None:
        if self.scale_lr_by_ess is not None and (self.rollout_is is None or self.mode != "decoupled"):
            raise ValueError(
                f"{_SECTION}.scale_lr_by_ess={self.scale_lr_by_ess} needs weights that are known before the "
                f"update, got rollout_is={self.rollout_is} in {self.mode} mode; pass rollout_is=sequence in "
                "decoupled mode, or drop it"
            )

    def _check_target_acceptance(self) -> None:
        if self.rollout_rs_target_acceptance is None:
            return
        key = f"{_SECTION}.rollout_rs_target_acceptance={self.rollout_rs_target_acceptance}"
        if self.rollout_rs not in ("token_k1", "seq_sum_k1", "seq_mean_k1") or not isinstance(
            self.rollout_rs_threshold, float
        ):
            raise ValueError(
                f"{key} needs one rule out of token_k1, seq_sum_k1 and seq_mean_k1, and one number as its "
                f"first threshold; got rollout_rs={self.rollout_rs} and "
                f"rollout_rs_threshold={self.rollout_rs_threshold}"
            )
        if self.diagnostics != "full":
            raise ValueError(
                f"{key} reads the histograms of {_SECTION}.diagnostics=full; got {self.diagnostics}"
            )

    @property
    def mode(self) -> CorrectionMode:
        """The mode of correction."""
        if self.bypass_mode:
            return "bypass"
        return "interpolated" if self.proximal == "interpolate" else "decoupled"

    @property
    def named_loss(self) -> str | None:
        """The policy loss that ``loss_type`` names. None if ``actor.policy_loss.loss_mode`` names it."""
        return None if self.loss_type == "ppo_clip" else self.loss_type

    @property
    def applies_weights(self) -> bool:
        """Whether weights enter the loss. A loss whose own ratio is current/rollout only has them
        reported."""
        return not self.bypass_mode or self.loss_type == "reinforce"

    @property
    def head_tokens(self) -> int:
        """Most likely tokens that engines report beside each sampled one. 0 if they report none."""
        return self.score_centering.top_k if self.score_centering.enabled else 0

    @property
    def rejects(self) -> bool:
        """Whether anything can reject tokens whose log-probs are finite."""
        return self.settings().rejects

    def settings(self) -> CorrectionSettings:
        """The options as typed values."""
        level, veto = self.rollout_is, self.rollout_token_veto_threshold
        return CorrectionSettings(
            weights=None
            if level is None
            else WeightSettings(level, self.weight_threshold(), self.rollout_is_batch_normalize),
            rules=tuple(
                BoundedRule.from_threshold(REJECTION_RULES[n], bound)
                for n, bound in self.rejection_bounds().items()
            ),
            log_veto=None if veto is None else math.log(veto),
            opsm_threshold=self.rollout_opsm_threshold,
            nonfinite="reject_sequence" if self.nonfinite_logprob == "raise" else self.nonfinite_logprob,
            full=self.diagnostics == "full",
            tests_misalignment=self.mode == "decoupled",
        )

    def effective_fields(self) -> dict[str, object]:
        """The fields in effect: those that differ from their defaults, and the threshold and the loss that
        are used."""
        is_read = {"rollout_is_threshold": self.rollout_is is not None, "loss_type": self.bypass_mode}
        changed = self.model_dump(exclude_defaults=True)
        fields = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if is_read.get(name, name in changed)
        }
        for name, value in fields.pop("score_centering", ScoreCenteringConfig()):
            if value != type(self.score_centering).model_fields[name].default:
                fields[f"score_centering.{name}"] = value
        return fields

    def weight_threshold(self) -> Threshold:
        """The truncation bound, or the band, of the weights."""
        return parse_threshold(self.rollout_is_threshold, f"{_SECTION}.rollout_is_threshold")

    def rejection_bounds(self) -> dict[str, Threshold]:
        """Every rejection rule with its bounds, in the order given. Raises ``ValueError`` for invalid
        thresholds."""
        key = f"{_SECTION}.rollout_rs"
        if self.rollout_rs is None:
            if self.rollout_rs_threshold is not None:
                raise ValueError(
                    f"{key}_threshold={self.rollout_rs_threshold} bounds nothing: {key} is null; name its "
                    "rules"
                )
            return {}
        if self.rollout_rs_threshold is None:
            raise ValueError(
                f"{key}={self.rollout_rs} needs {key}_threshold, got null; pass one bound, or one for each "
                "rule"
            )
        rules = parse_rules(str(self.rollout_rs), key)
        specs = [
            parse_threshold(spec, f"{key}_threshold") for spec in threshold_specs(self.rollout_rs_threshold)
        ]
        if (
            len(rules) == 1
            and rules[0].bounds_ratio
            and len(specs) == 2
            and all(spec.lower is None for spec in specs)
        ):
            raise ValueError(
                f"{key}_threshold gives two bounds for the one rule {rules[0].name}; write a band as "
                f"{specs[0]}_{specs[1]} or as {{lower: {specs[0]}, upper: {specs[1]}}}"
            )
        if len(specs) not in (1, len(rules)):
            raise ValueError(
                f"{key}_threshold must give one bound for all rules, or one for each of the {len(rules)} in "
                f"{self.rollout_rs}; got {len(specs)}"
            )
        bounds = dict(zip(rules, specs * len(rules) if len(specs) == 1 else specs, strict=True))
        for rule, bound in bounds.items():
            _check_bound(rule, bound, f"{key}_threshold of {rule.name}")
        return {rule.name: bound for rule, bound in bounds.items()}

    @classmethod
    def from_legacy(cls, mapping: Mapping[str, object]) -> tuple[Self, list[str]]:
        """The configuration that settings of any verl release since August 2025 mean today, and notes on what
        changed.

        See ``import_legacy`` for the keys. Raises ``ValueError`` for keys and values of no release.
        """
        fields, notes = import_legacy(mapping)
        return cls.model_validate(fields), notes


def _check_bound(rule: RejectionRule, bound: Threshold, key: str) -> None:
    if not rule.bounds_ratio and bound.lower is not None:
        raise ValueError(f"{key} must be one upper bound; got {bound}, pass {bound.upper}")
    if not rule.bounds_ratio and bound.upper >= rule.largest:
        raise ValueError(f"{key} must be below {rule.largest:g}, the most there can be; got {bound}")
    if rule.bounds_ratio and bound.reciprocal_lower > bound.upper:
        raise ValueError(
            f"{key} as one number u means 1/u to u and must be >= 1; got {bound}, pass {1 / bound.upper:g}"
        )


def _is_one_band(value: object, rules: object) -> bool:
    """Whether a list of two numbers means lower and upper bound: there is one rule, and it takes a band."""
    one_rule = isinstance(rules, str) and rules in REJECTION_RULES and REJECTION_RULES[rules].bounds_ratio
    return (
        one_rule
        and isinstance(value, (list, tuple))
        and [type(part) in (int, float) for part in value] == [True, True]
    )


def _as_number_or_text(threshold: Threshold) -> float | str:
    return threshold.upper if threshold.lower is None else str(threshold)
