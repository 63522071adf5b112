"""ROLLOUT CORRECTION: measure the gap between trainer and rollout policy, weigh and reject what it biases.
Pure."""

from verl_rc.correction.batch import (
    CorrectionResult,
    NonFiniteLogProbError,
    compute_rollout_correction,
    correct_rows,
    correct_sequences,
    measure,
    require_finite,
)
from verl_rc.correction.context import SequenceContext
from verl_rc.correction.correct import candidate_weights
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.correction.metrics import Numbers, bound_for_acceptance
from verl_rc.correction.statistics import CorrectionStatistics
from verl_rc.tensor_ops.logprobs import interpolate_proximal

__all__ = [
    "LogRatio",
    "candidate_weights",
    "CorrectionResult",
    "CorrectionStatistics",
    "NonFiniteLogProbError",
    "Numbers",
    "SequenceContext",
    "bound_for_acceptance",
    "compute_rollout_correction",
    "correct_rows",
    "correct_sequences",
    "interpolate_proximal",
    "measure",
    "require_finite",
]
