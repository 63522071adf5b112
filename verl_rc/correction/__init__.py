"""ROLLOUT CORRECTION: measure the gap between trainer and rollout policy, weigh and reject what it biases. Pure."""

from verl_rc.correction.apply import CorrectionResult, apply, compute_rollout_correction
from verl_rc.correction.context import RowContext
from verl_rc.correction.diagnostics import correction_metrics
from verl_rc.correction.finite import NonFiniteLogProbError, require_finite
from verl_rc.correction.measure import measure
from verl_rc.correction.moments import Numbers
from verl_rc.correction.probability_gap import probability_gap
from verl_rc.correction.proximal import interpolate_proximal
from verl_rc.correction.statistics import CorrectionStatistics
from verl_rc.correction.what_if import acceptance, bound_for_acceptance

__all__ = [
    "CorrectionResult",
    "CorrectionStatistics",
    "NonFiniteLogProbError",
    "Numbers",
    "RowContext",
    "acceptance",
    "apply",
    "bound_for_acceptance",
    "compute_rollout_correction",
    "correction_metrics",
    "interpolate_proximal",
    "measure",
    "probability_gap",
    "require_finite",
]
