"""Tensor operations: masked sums and whitening, row blocks, log-probs from hidden states, divergence
estimators."""

from verl_rc.metrics.bounds import LOG_RATIO_BOUND
from verl_rc.tensor_ops.divergence import (
    KL_KINDS,
    binary_kl,
    bound_log_ratio,
    k1_estimate,
    k2_estimate,
    k3_estimate,
    kl_penalty,
    require_functions,
)
from verl_rc.tensor_ops.logprobs import HiddenStateScores, ScoreOptions, scores_from_hidden_states
from verl_rc.tensor_ops.masked import (
    gathered_rows,
    is_rounding,
    masked_row_sums,
    masked_sum,
    masked_whiten,
    placed,
    row_slices,
)

__all__ = [
    "KL_KINDS",
    "LOG_RATIO_BOUND",
    "HiddenStateScores",
    "ScoreOptions",
    "binary_kl",
    "bound_log_ratio",
    "gathered_rows",
    "is_rounding",
    "k1_estimate",
    "k2_estimate",
    "k3_estimate",
    "kl_penalty",
    "masked_row_sums",
    "masked_sum",
    "masked_whiten",
    "placed",
    "require_functions",
    "row_slices",
    "scores_from_hidden_states",
]
