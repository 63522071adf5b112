"""A configuration read once: rules with their bounds, the weights' threshold, what to measure."""

from collections.abc import Mapping
from dataclasses import dataclass

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.thresholds import Threshold
from verl_rc.correction.rejection import BoundedRule, bounded_rules


@dataclass(frozen=True)
class ResolvedCorrection:
    """What every function of this package needs to know."""

    config: RolloutCorrectionConfig
    """Where it comes from."""
    rules: list[BoundedRule]
    """Rejection rules in the order given."""
    threshold: Threshold | None
    """Bounds of the weights; None when there are none."""

    @classmethod
    def of(cls, given: RolloutCorrectionConfig | Mapping[str, object]) -> "ResolvedCorrection":
        """Read a configuration, or a mapping of its fields (``ValueError`` for what is no configuration)."""
        config = given if isinstance(given, RolloutCorrectionConfig) else RolloutCorrectionConfig.model_validate(given)
        return cls(config, bounded_rules(config), None if config.rollout_is is None else config.weight_threshold())

    @property
    def full(self) -> bool:
        """Whether the diagnostics beyond verl's are measured."""
        return self.config.diagnostics == "full"

    @property
    def has_token_weights(self) -> bool:
        """Whether every token has a weight of its own."""
        return self.config.rollout_is is not None and not self.config.weight_is_per_row

    @property
    def has_row_weights(self) -> bool:
        """Whether all tokens of a row share one weight."""
        return self.config.rollout_is is not None and self.config.weight_is_per_row
