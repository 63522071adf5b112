"""Losses, pure: token losses of the policy, value loss, regularisers, and their aggregation."""

from verl_rc.losses.aggregate import AGGREGATION_MODES, Aggregation, AggregationMode, aggregate_loss
from verl_rc.losses.covariance import (
    covariance_means,
    selection_scores,
    selection_size,
    selection_threshold,
)
from verl_rc.losses.inputs import (
    CovarianceStatistics,
    LossMetrics,
    PolicyLoss,
    PolicyLossInputs,
    clean_policy_loss_inputs,
)
from verl_rc.losses.loss_metric import LossMetric, token_metric
from verl_rc.losses.parameters import PolicyLossParameters
from verl_rc.losses.policy import (
    compute_policy_loss,
    policy_loss_names,
    register_policy_loss,
    resolve_policy_loss,
)
from verl_rc.losses.regularisers import compute_entropy_loss, compute_kl_loss
from verl_rc.losses.value import ExplainedVariance, compute_value_loss, explained_variance

__all__ = [
    "AGGREGATION_MODES",
    "Aggregation",
    "AggregationMode",
    "CovarianceStatistics",
    "ExplainedVariance",
    "LossMetric",
    "LossMetrics",
    "PolicyLoss",
    "PolicyLossInputs",
    "PolicyLossParameters",
    "aggregate_loss",
    "clean_policy_loss_inputs",
    "compute_entropy_loss",
    "compute_kl_loss",
    "compute_policy_loss",
    "compute_value_loss",
    "covariance_means",
    "explained_variance",
    "policy_loss_names",
    "register_policy_loss",
    "resolve_policy_loss",
    "selection_scores",
    "selection_size",
    "selection_threshold",
    "token_metric",
]
