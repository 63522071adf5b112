"""Losses, pure: token losses of the policy, value loss, regularisers, and their aggregation."""

from verl_rc.algorithm.losses.aggregate import AGGREGATION_MODES, Aggregation, aggregate_loss, token_mean
from verl_rc.algorithm.losses.distillation import TopTokens, compute_distillation_loss
from verl_rc.algorithm.losses.inputs import (
    LossMetrics,
    MiniBatchStatistics,
    PolicyLoss,
    PolicyLossInputs,
    clean_policy_loss_inputs,
    loss_options,
    policy_loss_names,
    read_loss_options,
    register_policy_loss,
    resolve_policy_loss,
)
from verl_rc.algorithm.losses.policy import compute_entropy_loss, compute_kl_loss, compute_policy_loss
from verl_rc.algorithm.losses.selection import mini_batch_statistics
from verl_rc.algorithm.losses.value import compute_value_loss, explained_variance

__all__ = [
    "AGGREGATION_MODES",
    "Aggregation",
    "MiniBatchStatistics",
    "TopTokens",
    "LossMetrics",
    "PolicyLoss",
    "PolicyLossInputs",
    "aggregate_loss",
    "clean_policy_loss_inputs",
    "compute_distillation_loss",
    "compute_entropy_loss",
    "compute_kl_loss",
    "compute_policy_loss",
    "compute_value_loss",
    "mini_batch_statistics",
    "explained_variance",
    "loss_options",
    "policy_loss_names",
    "read_loss_options",
    "register_policy_loss",
    "resolve_policy_loss",
    "token_mean",
]
