"""Masked sums and whitening, log-probs from logits, divergences: small pure functions the mathematics is written with."""

from verl_rc.tensor_ops.divergence import KL_KINDS, kl_penalty
from verl_rc.tensor_ops.logprobs import entropy_from_logits, log_probs_from_logits, sum_pi_squared_from_logits
from verl_rc.tensor_ops.masked import masked_row_sums, masked_sum, masked_whiten

__all__ = [
    "KL_KINDS",
    "entropy_from_logits",
    "kl_penalty",
    "log_probs_from_logits",
    "masked_row_sums",
    "masked_sum",
    "masked_whiten",
    "sum_pi_squared_from_logits",
]
