"""ROLLOUT CORRECTION: measure the gap between trainer and rollout policy, weigh and reject what it biases. Pure."""

from verl_rc.correction.apply import CorrectionResult, apply, compute_rollout_correction
from verl_rc.correction.diagnostics import correction_metrics
from verl_rc.correction.measure import measure
from verl_rc.correction.statistics import CorrectionStatistics

__all__ = [
    "CorrectionResult",
    "CorrectionStatistics",
    "apply",
    "compute_rollout_correction",
    "correction_metrics",
    "measure",
]
