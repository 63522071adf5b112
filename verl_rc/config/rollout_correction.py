"""WHAT rollout correction does: weights, rejection, and how they enter the loss."""

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from verl_rc.config.base import StrictModel
from verl_rc.config.thresholds import Threshold, parse_threshold

REJECTION_RULES = (
    *(f"token_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_{agg}_{k}" for agg in ("sum", "mean") for k in ("k1", "k2", "k3")),
    *(f"seq_max_{k}" for k in ("k2", "k3")),
)
"""``<scope>_<divergence>``: token rules reject single tokens, seq rules whole sequences."""

_SECTION = "algorithm.rollout_correction"
_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_TOKEN, _SEQUENCE = {"rollout_is": "token"}, {"rollout_is": "sequence"}
_BAND = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _BAND,
    "decoupled_seq_is_rs": {**_SEQUENCE, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": {**_SEQUENCE, **_GEO},
    "decoupled_geo_rs_token_tis": {**_TOKEN, **_GEO},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": {**_SEQUENCE, **_K3},
    "decoupled_k3_rs_token_tis": {**_TOKEN, **_K3},
    "bypass_ppo_clip": _CLIP,
    "bypass_ppo_clip_geo_rs": {**_CLIP, **_GEO},
    "bypass_ppo_clip_k3_rs": {**_CLIP, **_K3},
    "bypass_pg_is": {**_REINFORCE, **_SEQUENCE},
    "bypass_pg_token_icepop": {**_REINFORCE, **_BAND},
    "bypass_pg_geo_rs": {**_REINFORCE, **_GEO},
    "bypass_pg_geo_rs_seq_tis": {**_REINFORCE, **_SEQUENCE, **_GEO},
    "bypass_pg_geo_rs_token_tis": {**_REINFORCE, **_TOKEN, **_GEO},
}
"""Named choices: the fields in which they differ from the defaults."""


def preset_fields(name: str) -> dict[str, Any]:
    """The fields a preset sets. Raises ``ValueError`` naming the nearest preset for an unknown name."""
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, list(PRESETS), n=1, cutoff=0.0)[0]
        raise ValueError(f"a preset must be one of {', '.join(PRESETS)}; got {name!r}, the nearest is {nearest}")
    return dict(PRESETS[name])


class RolloutCorrectionConfig(StrictModel):
    """``algorithm.rollout_correction.*``. The default measures the gap and corrects nothing."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights pi_train/pi_rollout per token or per sequence (product over its tokens); null: none."""
    rollout_is_threshold: float | str | dict[str, float] | list[float] | None = 2.0
    """One number: weights are truncated there. A band (``"0.5_5.0"``, ``{lower, upper}``): weights outside become zero."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch (after truncation)."""
    rollout_rs: str | None = None
    """Rejection rules, separated by commas; what fails any of them is left out of the loss; null: none."""
    rollout_rs_threshold: float | str | dict[str, float] | list[Any] | None = None
    """One threshold for all rules, or one for each: k1 rules take bounds on pi_train/pi_rollout (one number u means 1/u to u),
    k2 and k3 rules one upper bound."""
    bypass_mode: bool = False
    """Two policies instead of three: the rollout policy takes the proximal one's place, and nothing is recomputed."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """The loss of bypass mode."""
    rejection_denominator: Literal["original", "kept"] = "original"
    """Tokens a loss is divided by: all response tokens, or the kept ones (which scales the gradient by 1/acceptance)."""
    rejected_in_group_baseline: Literal["include", "exclude"] = "include"
    """Whether wholly rejected rows count in their group's baseline."""
    nonfinite_logprob: Literal["reject_sequence", "reject_token", "neutral", "raise"] = "reject_sequence"
    """What happens to a token whose log-prob is not a finite number."""
    nonfinite_stop_fraction: float = Field(0.01, ge=0, le=1)
    """Share of tokens without finite log-probs above which the run stops."""
    max_skipped_updates: int = Field(10, ge=1)
    """Optimizer steps in a row of which rejection left nothing, after which the run stops."""

    @field_validator("rollout_rs", mode="before")
    @classmethod
    def _rules_as_text(cls, value: object) -> object:
        return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value

    @model_validator(mode="after")
    def _check(self) -> "RolloutCorrectionConfig":
        if self.rollout_is is not None:
            if self.rollout_is_threshold is None:
                raise ValueError(f"{_SECTION}.rollout_is={self.rollout_is} needs {_SECTION}.rollout_is_threshold, got null")
            self.weight_threshold()
        self.rejection_bounds()
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError(f"{_SECTION}.loss_type=reinforce is a loss of bypass mode: pass {_SECTION}.bypass_mode=True, got False")
        if self.rejection_denominator == "kept" and self.rollout_rs is None:
            raise ValueError(f"{_SECTION}.rejection_denominator=kept needs {_SECTION}.rollout_rs, which is null")
        if self.rejected_in_group_baseline == "exclude" and (self.bypass_mode or self.rollout_rs is None):
            raise ValueError(
                f"{_SECTION}.rejected_in_group_baseline=exclude needs decoupled mode and {_SECTION}.rollout_rs, got "
                f"bypass_mode={self.bypass_mode} and rollout_rs={self.rollout_rs}"
            )
        return self

    def weight_threshold(self) -> Threshold:
        """The truncation bound, or the band, of the weights."""
        return parse_threshold(self.rollout_is_threshold, f"{_SECTION}.rollout_is_threshold")

    def rejection_bounds(self) -> dict[str, Threshold]:
        """Every rejection rule with its bounds, in the order given. Raises ``ValueError`` for what cannot be meant."""
        key = f"{_SECTION}.rollout_rs"
        if self.rollout_rs is None:
            if self.rollout_rs_threshold is not None:
                raise ValueError(f"{key}_threshold needs {key}: name the rules it bounds, got null")
            return {}
        rules = list(dict.fromkeys(rule.strip() for rule in self.rollout_rs.split(",")))
        for rule in rules:
            if rule not in REJECTION_RULES:
                nearest = difflib.get_close_matches(rule, REJECTION_RULES, n=1, cutoff=0.0)[0]
                raise ValueError(f"{key} must name rules among {', '.join(REJECTION_RULES)}; got {rule!r}, the nearest is {nearest}")
        if self.rollout_rs_threshold is None:
            raise ValueError(f"{key}={self.rollout_rs} needs {key}_threshold, got null")
        given = self._threshold_list()
        if len(given) not in (1, len(rules)):
            raise ValueError(f"{key}_threshold must give one bound for all rules or one for each of the {len(rules)}, got {len(given)}")
        values = given * len(rules) if len(given) == 1 else given
        bounds = {rule: parse_threshold(value, f"{key}_threshold") for rule, value in zip(rules, values, strict=True)}
        for rule, bound in bounds.items():
            if not rule.endswith("k1") and bound.lower is not None:
                raise ValueError(f"{key}_threshold of {rule} must be one upper bound, got {bound.lower}_{bound.upper}")
            if rule.endswith("k1") and bound.reciprocal_lower > bound.upper:
                raise ValueError(f"{key}_threshold of {rule} as one number must be >= 1 (it means 1/u to u), got {bound.upper}")
        return bounds

    def _threshold_list(self) -> list[Any]:
        value = self.rollout_rs_threshold
        if isinstance(value, str):
            return value.split(",")
        return list(value) if isinstance(value, list) else [value]

    @classmethod
    def from_preset(cls, name: str) -> "RolloutCorrectionConfig":
        """The preset of that name."""
        return cls(**preset_fields(name))

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0) -> "RolloutCorrectionConfig":
        """Token weights truncated at ``threshold``, three policies (truncated importance sampling)."""
        return cls(**{**preset_fields("decoupled_token_is"), "rollout_is_threshold": threshold})

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0) -> "RolloutCorrectionConfig":
        """Sequence weights truncated at ``threshold``, three policies."""
        return cls(**{**preset_fields("decoupled_seq_is"), "rollout_is_threshold": threshold})

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold: float = 2.0, rs_threshold: str = "0.5_2.0") -> "RolloutCorrectionConfig":
        """Sequence weights, and rejection of sequences whose ratio leaves a band."""
        fields = {"rollout_is_threshold": is_threshold, "rollout_rs_threshold": rs_threshold}
        return cls(**{**preset_fields("decoupled_seq_is_rs"), **fields})

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: str = "0.999_1.001") -> "RolloutCorrectionConfig":
        """Rejection of sequences whose geometric mean ratio leaves a band, no weights."""
        return cls(**{**preset_fields("decoupled_geo_rs"), "rollout_rs_threshold": rs_threshold})

    @classmethod
    def disabled(cls) -> "RolloutCorrectionConfig":
        """Metrics only."""
        return cls()
