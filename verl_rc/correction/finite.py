"""The policy for log-probs that are NaN or infinite."""

from collections.abc import Mapping

from verl_rc.config.rollout_correction import RolloutCorrectionConfig

_METRIC = "rollout_corr/nonfinite_token_fraction"
_SECTION = "algorithm.rollout_correction"


class NonFiniteLogProbError(ValueError):
    """Too many tokens have log-probs that are not finite numbers."""


def require_finite(metrics: Mapping[str, float], config: RolloutCorrectionConfig) -> None:
    """Raise ``NonFiniteLogProbError`` when more log-probs than the configuration allows are NaN or infinite.

    ``metrics`` are those of a correction. Under ``nonfinite_logprob=raise`` none is allowed, else the share
    ``nonfinite_stop_fraction`` of the response tokens.
    """
    allowed = 0.0 if config.nonfinite_logprob == "raise" else config.nonfinite_stop_fraction
    share = metrics[_METRIC]
    if share > allowed:
        raise NonFiniteLogProbError(
            f"at most {allowed:.2%} of the response tokens may have a log-prob that is NaN or infinite, got {share:.2%}. "
            "Corrupt logits are the usual cause: look at the weights and the precision of engine and trainer. To go on all the "
            f"same, raise {_SECTION}.nonfinite_stop_fraction (now {config.nonfinite_stop_fraction}) under "
            f"{_SECTION}.nonfinite_logprob=reject_sequence."
        )
