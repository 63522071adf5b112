"""Named choices of rollout correction: the names of every verl release since 2025, each resolving to fields
of today."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from verl_rc.config.errors import nearest_key
from verl_rc.config.schema import StrictModel

_TOKEN: Mapping[str, object] = {"rollout_is": "token"}
_SEQUENCE: Mapping[str, object] = {"rollout_is": "sequence"}
_ICEPOP: Mapping[str, object] = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_GEO: Mapping[str, object] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3: Mapping[str, object] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_TOKEN_BAND: Mapping[str, object] = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
_PRODUCT_BAND: Mapping[str, object] = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_VETO: Mapping[str, object] = {
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": 1.001,
    "rollout_token_veto_threshold": 1e-4,
}
_CLIP: Mapping[str, object] = {"bypass_mode": True, "loss_type": "ppo_clip"}
_CENTERED: Mapping[str, object] = {"score_centering": {"enabled": True}}
_REINFORCE: Mapping[str, object] = {"bypass_mode": True, "loss_type": "reinforce"}

_WHEN_C1, _WHEN_C2, _WHEN_C3 = "verl, November 2025", "verl, November to December 2025", "verl, December 2025"
_WHEN_D, _WHEN_DOCS = "verl, since January 2026", "verl, in its documents only"


@dataclass(frozen=True)
class Preset:
    """One named choice."""

    summary: str
    """Its effect, in one line."""
    fields: Mapping[str, object]
    """The fields in which it differs from the defaults."""
    origin: str = _WHEN_D
    """The origin of its name: who named it, then after a comma when or what."""


_TODAY: Mapping[str, Preset] = {
    "disabled": Preset("measure only: no weights, no rejection", {}),
    "decoupled_token_is": Preset("token weights truncated at 2, three policies", _TOKEN),
    "decoupled_seq_is": Preset("sequence weights truncated at 2, three policies", _SEQUENCE),
    "decoupled_token_icepop": Preset("token weights, zero outside [0.5, 5], three policies", _ICEPOP),
    "decoupled_seq_is_rs": Preset(
        "sequence weights; sequences with a ratio outside [0.5, 2] are rejected",
        {**_SEQUENCE, **_PRODUCT_BAND},
    ),
    "decoupled_geo_rs": Preset(
        "sequences with a geometric mean ratio outside [0.999, 1.001] are rejected", _GEO
    ),
    "decoupled_geo_rs_seq_tis": Preset("geometric rejection and sequence weights", {**_SEQUENCE, **_GEO}),
    "decoupled_geo_rs_token_tis": Preset("geometric rejection and token weights", {**_TOKEN, **_GEO}),
    "decoupled_k3_rs": Preset("sequences with a mean k3 above 0.01 are rejected", _K3),
    "decoupled_k3_rs_seq_tis": Preset("k3 rejection and sequence weights", {**_SEQUENCE, **_K3}),
    "decoupled_k3_rs_token_tis": Preset("k3 rejection and token weights", {**_TOKEN, **_K3}),
    "bypass_ppo_clip": Preset("two policies: PPO clip straight against the rollout policy", _CLIP),
    "bypass_ppo_clip_geo_rs": Preset("two policies, PPO clip, geometric rejection", {**_CLIP, **_GEO}),
    "bypass_ppo_clip_k3_rs": Preset("two policies, PPO clip, k3 rejection", {**_CLIP, **_K3}),
    "bypass_pg_is": Preset(
        "two policies: policy gradient with sequence weights", {**_REINFORCE, **_SEQUENCE}
    ),
    "bypass_pg_token_icepop": Preset(
        "two policies: policy gradient with token weights in a band", {**_REINFORCE, **_ICEPOP}
    ),
    "bypass_pg_geo_rs": Preset("two policies: policy gradient, geometric rejection", {**_REINFORCE, **_GEO}),
    "bypass_pg_geo_rs_seq_tis": Preset(
        "two policies: policy gradient, geometric rejection, sequence weights",
        {**_REINFORCE, **_SEQUENCE, **_GEO},
    ),
    "bypass_pg_geo_rs_token_tis": Preset(
        "two policies: policy gradient, geometric rejection, token weights", {**_REINFORCE, **_TOKEN, **_GEO}
    ),
}

_FORMER: Mapping[str, Preset] = {
    "token_is": Preset("now decoupled_token_is", _TOKEN, _WHEN_C1),
    "token_tis": Preset("now decoupled_token_is", _TOKEN, _WHEN_C1),
    "seq_is": Preset("now decoupled_seq_is", _SEQUENCE, _WHEN_C1),
    "seq_is_rs": Preset("now decoupled_seq_is_rs", {**_SEQUENCE, **_PRODUCT_BAND}, _WHEN_C1),
    "seq_mis": Preset(
        "sequence weights; ratios above 2 are rejected, with no bound below",
        {**_SEQUENCE, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "1e-09_2.0"},
        _WHEN_C1,
    ),
    "geo_rs": Preset("geometric rejection at 1.001 both ways, with a veto below 1e-4", _GEO_VETO, _WHEN_C1),
    "geo_mis": Preset(
        "geometric rejection outside [0.999, 1.001], with a veto below 1e-4",
        {**_GEO, "rollout_token_veto_threshold": 1e-4},
        _WHEN_C1,
    ),
    "ppo_is_bypass": Preset(
        "now bypass_ppo_clip: its weights were 1 by construction, and are metrics only here",
        {**_CLIP, **_TOKEN},
        _WHEN_C1,
    ),
    "pure_is": Preset("now bypass_pg_is", {**_REINFORCE, **_SEQUENCE}, _WHEN_C1),
    "pg_is": Preset("now bypass_pg_is", {**_REINFORCE, **_SEQUENCE}, _WHEN_C2),
    "pg_rs": Preset("policy gradient, geometric rejection, veto", {**_REINFORCE, **_GEO_VETO}, _WHEN_C2),
    "pure_rs": Preset("policy gradient, geometric rejection, veto", {**_REINFORCE, **_GEO_VETO}, _WHEN_C2),
    "geo_rs_seq_tis": Preset(
        "geometric rejection, veto and sequence weights", {**_SEQUENCE, **_GEO_VETO}, _WHEN_C2
    ),
    "pg_geo_rs_seq_tis": Preset(
        "policy gradient, geometric rejection, veto, sequence weights",
        {**_REINFORCE, **_SEQUENCE, **_GEO_VETO},
        _WHEN_C2,
    ),
    "bypass_pg_rs": Preset(
        "policy gradient, geometric rejection, veto", {**_REINFORCE, **_GEO_VETO}, _WHEN_C3
    ),
    "decoupled_k1_rs": Preset("another name for decoupled_geo_rs", _GEO, _WHEN_DOCS),
    "bypass_ppo_clip_k1_rs": Preset("another name for bypass_ppo_clip_geo_rs", {**_CLIP, **_GEO}, _WHEN_DOCS),
    "bypass_pg_k1_rs": Preset("another name for bypass_pg_geo_rs", {**_REINFORCE, **_GEO}, _WHEN_DOCS),
    "token_is_rs": Preset(
        "token weights; tokens with a ratio outside [0.5, 2] are rejected",
        {**_TOKEN, **_TOKEN_BAND},
        _WHEN_DOCS,
    ),
    "token_rs": Preset("tokens with a ratio outside [0.5, 2] are rejected", _TOKEN_BAND, _WHEN_DOCS),
    "seq_rs": Preset("sequences with a ratio outside [0.5, 2] are rejected", _PRODUCT_BAND, _WHEN_DOCS),
}

_PAPERS: Mapping[str, Preset] = {
    "tis": Preset(
        "token weights truncated at 2, as FlashRL introduced them",
        _TOKEN,
        "FlashRL, Yao et al. 2025, truncated IS",
    ),
    "icepop": Preset("token weights, zero outside [0.5, 5]", _ICEPOP, "arXiv:2510.18855, IcePop"),
    "kpop": Preset(
        "tokens with a binary KL above 2, in the larger direction, are rejected",
        {"rollout_rs": "token_kpop", "rollout_rs_threshold": 2.0},
        "arXiv:2606.15079, KPop",
    ),
    "trm": Preset(
        "sequences with a token of |log ratio| above 1, or a mean k3 above 0.01, are rejected",
        {"rollout_rs": "seq_max_k2,seq_mean_k3", "rollout_rs_threshold": "0.5,0.01"},
        "arXiv:2512.23075, trust region masking; the bounds are this project's",
    ),
    "seq_mask_tis": Preset(
        "geometric band [0.99, 1.01] for sequences, token weights without truncation for those kept",
        {
            **_TOKEN,
            "rollout_is_threshold": 4.9e8,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": "0.99_1.01",
        },
        "OpenRLHF, NeMo-RL, seq-mask-tis",
    ),
    "mis_po": Preset(
        "tokens outside [0.5, 2] and sequences with a geometric mean ratio outside [0.996, 1.001] are "
        "rejected; no weights",
        {"rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "0.5_2.0,0.996_1.001"},
        "Step-3.5-Flash, MIS-PO of its report, with the sequence band of its ablations; the token band is "
        "this project's",
    ),
    "dppo_tv": Preset(
        "tokens whose probability differs by more than 0.15 are rejected",
        {"rollout_rs": "token_tv", "rollout_rs_threshold": 0.15},
        "arXiv:2602.04879, DPPO with binary total variation, symmetric and as a filter, with the bound of "
        "verl's example",
    ),
    "dppo_kl": Preset(
        "tokens with a binary KL above 0.05 are rejected",
        {"rollout_rs": "token_bkl", "rollout_rs_threshold": 0.05},
        "arXiv:2602.04879, DPPO with binary KL, symmetric and as a filter, with the bound of verl's example",
    ),
    "opsm": Preset(
        "tokens with a negative advantage are rejected in sequences whose mean log-ratio rollout/train is "
        "above 0.5",
        {"rollout_opsm_threshold": 0.5},
        "arXiv:2512.02556, DeepSeek-V3.2, off-policy sequence masking, which names no bound",
    ),
    "prefix_is": Preset(
        "weights of a token: the product of the ratios up to it, truncated at 2",
        {"rollout_is": "prefix"},
        "Precup et al. 2000, per-decision importance sampling",
    ),
    "score_centering": Preset(
        "no weights: the loss less what the sampler expects of it, three policies",
        _CENTERED,
        "arXiv:2609.20807, score centering",
    ),
    "score_centering_token_is": Preset(
        "token weights truncated at 2, and the weighted loss less what the sampler expects of it",
        {**_TOKEN, **_CENTERED},
        "arXiv:2609.20807, score centering with truncated importance sampling",
    ),
    "topr": Preset(
        "two policies: policy gradient; sequence weights, truncated at 1, where the advantage is negative",
        {"bypass_mode": True, "loss_type": "topr"},
        "arXiv:2503.14286, tapered off-policy REINFORCE; the advantage's sign stands for the reward's",
    ),
}

PRESETS: Mapping[str, Preset] = {**_TODAY, **_FORMER, **_PAPERS}
"""Every preset by name."""


def preset_fields(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a preset sets, under those ``given``; of a section each of its keys. Raises
    ``ValueError`` naming the nearest preset."""
    if name not in PRESETS:
        raise ValueError(
            f"a preset must be one of {', '.join(PRESETS)}; got {name!r}, did you mean "
            f"{nearest_key(name, PRESETS)}?"
        )
    fields = {**PRESETS[name].fields, **given}
    for section, keys in PRESETS[name].fields.items():
        if isinstance(keys, Mapping) and isinstance(fields[section], Mapping):
            fields[section] = {**keys, **fields[section]}
    return fields


class PresetConstructors(StrictModel):
    """One constructor for each preset of today, with its thresholds as arguments."""

    @classmethod
    def from_preset(cls, name: str, **fields: object) -> Self:
        """The preset of that name, with other ``fields`` on top of it. Raises ``ValueError`` for an unknown
        name."""
        return cls.model_validate(preset_fields(name, fields))

    @classmethod
    def disabled(cls) -> Self:
        """Measure and correct nothing."""
        return cls.from_preset("disabled")

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0) -> Self:
        """Token weights ``min(rho_t, threshold)`` (truncated importance sampling), three policies."""
        return cls.from_preset("decoupled_token_is", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0) -> Self:
        """Sequence weights ``min(prod_t rho_t, threshold)``, three policies."""
        return cls.from_preset("decoupled_seq_is", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> Self:
        """Token weights, zero outside ``[threshold_lower, threshold]`` (IcePop, arXiv:2510.18855), three
        policies."""
        return cls.from_preset(
            "decoupled_token_icepop", rollout_is_threshold=_band(threshold_lower, threshold)
        )

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold: float = 2.0, rs_threshold: float | str = "0.5_2.0") -> Self:
        """Sequence weights, and rejection of sequences whose ratio leaves a band."""
        return cls.from_preset(
            "decoupled_seq_is_rs", rollout_is_threshold=is_threshold, rollout_rs_threshold=rs_threshold
        )

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: float | str = "0.999_1.001") -> Self:
        """Rejection of sequences whose geometric mean ratio leaves a band; no weights."""
        return cls.from_preset("decoupled_geo_rs", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = "0.999_1.001"
    ) -> Self:
        """Geometric rejection and truncated sequence weights."""
        return cls.from_preset(
            "decoupled_geo_rs_seq_tis", rollout_is_threshold=is_threshold, rollout_rs_threshold=rs_threshold
        )

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = "0.999_1.001"
    ) -> Self:
        """Geometric rejection and truncated token weights."""
        return cls.from_preset(
            "decoupled_geo_rs_token_tis", rollout_is_threshold=is_threshold, rollout_rs_threshold=rs_threshold
        )

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = 0.01) -> Self:
        """Rejection of sequences whose mean k3 exceeds a bound; no weights."""
        return cls.from_preset("decoupled_k3_rs", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01) -> Self:
        """k3 rejection and truncated sequence weights."""
        return cls.from_preset(
            "decoupled_k3_rs_seq_tis", rollout_is_threshold=is_threshold, rollout_rs_threshold=rs_threshold
        )

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01) -> Self:
        """k3 rejection and truncated token weights."""
        return cls.from_preset(
            "decoupled_k3_rs_token_tis", rollout_is_threshold=is_threshold, rollout_rs_threshold=rs_threshold
        )

    @classmethod
    def bypass_ppo_clip(cls) -> Self:
        """Two policies: PPO clip on train/rollout; no weights, which would count the ratio twice."""
        return cls.from_preset("bypass_ppo_clip")

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: float | str = "0.999_1.001") -> Self:
        """Two policies: PPO clip and geometric rejection."""
        return cls.from_preset("bypass_ppo_clip_geo_rs", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = 0.01) -> Self:
        """Two policies: PPO clip and k3 rejection."""
        return cls.from_preset("bypass_ppo_clip_k3_rs", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_is(cls, threshold: float = 2.0) -> Self:
        """Two policies: policy gradient with truncated sequence weights."""
        return cls.from_preset("bypass_pg_is", rollout_is_threshold=threshold)

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> Self:
        """Two policies: policy gradient with token weights, zero outside ``[threshold_lower, threshold]``."""
        return cls.from_preset(
            "bypass_pg_token_icepop", rollout_is_threshold=_band(threshold_lower, threshold)
        )

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: float | str = "0.999_1.001") -> Self:
        """Two policies: policy gradient and geometric rejection."""
        return cls.from_preset("bypass_pg_geo_rs", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = "0.999_1.001"
    ) -> Self:
        """Two policies: policy gradient, geometric rejection and truncated sequence weights."""
        return cls.from_preset(
            "bypass_pg_geo_rs_seq_tis", rollout_is_threshold=is_threshold, rollout_rs_threshold=rs_threshold
        )

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = "0.999_1.001"
    ) -> Self:
        """Two policies: policy gradient, geometric rejection and truncated token weights."""
        return cls.from_preset(
            "bypass_pg_geo_rs_token_tis", rollout_is_threshold=is_threshold, rollout_rs_threshold=rs_threshold
        )


def _band(lower: float, upper: float) -> str:
    return f"{lower!r}_{upper!r}"
