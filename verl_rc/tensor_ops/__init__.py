"""Tensor operations: masked sums and whitening, row blocks, log-probs from logits, divergence estimators."""

from verl_rc.tensor_ops.divergence import (
    KL_KINDS,
    LOG_RATIO_BOUND,
    binary_kl,
    bound_log_ratio,
    k1_estimate,
    k2_estimate,
    k3_estimate,
    kl_penalty,
)
from verl_rc.tensor_ops.logprobs import entropy_from_logits, log_probs_from_logits, sum_pi_squared_from_logits
from verl_rc.tensor_ops.masked import in_row_blocks, masked_row_sums, masked_sum, masked_whiten, row_slices

__all__ = [
    "KL_KINDS",
    "LOG_RATIO_BOUND",
    "binary_kl",
    "bound_log_ratio",
    "entropy_from_logits",
    "in_row_blocks",
    "k1_estimate",
    "k2_estimate",
    "k3_estimate",
    "kl_penalty",
    "log_probs_from_logits",
    "masked_row_sums",
    "masked_sum",
    "masked_whiten",
    "row_slices",
    "sum_pi_squared_from_logits",
]
