"""The numbers that policy losses take, read from a configuration section or a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyLossParameters:
    """Everything the policy losses can be tuned with.

    Attributes:
        clip_ratio_low: ε below 1, >= 0; a difference of ratios, for ``dppo_tv`` of probabilities, for ``dppo_kl`` nats.
        clip_ratio_high: ε above 1, >= 0; in the units of `clip_ratio_low`.
        clip_ratio_c: cap of the ratio for negative advantages (dual clip) and in ``dppo_*``, dimensionless, > 1.
        tau_pos: temperature of SAPO's gate for positive advantages, > 0.
        tau_neg: temperature of SAPO's gate for the other advantages, > 0.
        clip_cov_ratio: share of tokens that ``clip_cov`` drops, in (0, 1].
        clip_cov_lb: lower end of the covariance band of ``clip_cov``, exclusive.
        clip_cov_ub: upper end of the covariance band of ``clip_cov``, exclusive.
        kl_cov_ratio: share of tokens that ``kl_cov`` penalises, in (0, 1].
        ppo_kl_coef: weight of the penalty of ``kl_cov``, >= 0.
        dro_beta: weight of the quadratic penalty of ``dro``, > 0; None until it is set, and ``dro`` refuses None.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None

    def __post_init__(self) -> None:
        """Refuses numbers with which a loss would be meaningless."""
        _require(self.clip_ratio_low >= 0, "clip_ratio_low", ">= 0", self.clip_ratio_low)
        _require(self.clip_ratio_high >= 0, "clip_ratio_high", ">= 0", self.clip_ratio_high)
        _require(self.clip_ratio_c > 1, "clip_ratio_c", "> 1", self.clip_ratio_c)
        _require(self.tau_pos > 0, "tau_pos", "> 0", self.tau_pos)
        _require(self.tau_neg > 0, "tau_neg", "> 0", self.tau_neg)
        _require(0 < self.clip_cov_ratio <= 1, "policy_loss.clip_cov_ratio", "in (0, 1]", self.clip_cov_ratio)
        _require(self.clip_cov_lb < self.clip_cov_ub, "policy_loss.clip_cov_lb", "< clip_cov_ub", self.clip_cov_lb)
        _require(0 < self.kl_cov_ratio <= 1, "policy_loss.kl_cov_ratio", "in (0, 1]", self.kl_cov_ratio)
        _require(self.ppo_kl_coef >= 0, "policy_loss.ppo_kl_coef", ">= 0", self.ppo_kl_coef)
        _require(self.dro_beta is None or self.dro_beta > 0, "policy_loss.dro_beta", "> 0", self.dro_beta)

    @classmethod
    def from_config(cls, config: object | None) -> PolicyLossParameters:
        """Reads the section `actor_rollout_ref.actor`, as a mapping or as an object with the same names.

        `clip_ratio` speaks for whichever of `clip_ratio_low` and `clip_ratio_high` is absent or None. The keys of
        `policy_loss` are looked for in that subsection first, then beside the others. None gives the defaults.

        Raises:
            ValueError: when a number is outside its range.
        """
        if config is None or isinstance(config, PolicyLossParameters):
            return config or cls()
        sections = [section for section in (_entry(config, "policy_loss"), config) if section is not None]
        given: dict[str, float] = {}
        for name in cls.__dataclass_fields__:
            for section in sections:
                value = _entry(section, name)
                if value is not None and name not in given:
                    given[name] = _number(name, value)
        clip_ratio = _entry(config, "clip_ratio")
        if clip_ratio is not None:
            given.setdefault("clip_ratio_low", _number("clip_ratio", clip_ratio))
            given.setdefault("clip_ratio_high", _number("clip_ratio", clip_ratio))
        return cls(**given)


def _entry(section: object, name: str) -> object | None:
    if isinstance(section, Mapping):
        return section.get(name)
    return getattr(section, name, None)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"actor_rollout_ref.actor.{name} must be a number, got {value!r}")
    return float(value)


def _require(holds: bool, name: str, condition: str, value: object) -> None:
    if not holds:
        raise ValueError(f"actor_rollout_ref.actor.{name} must be {condition}, got {value!r}")
