"""The metrics of a run: records, their reduction, the catalogue of names, and sinks to show and store
them."""

from verl_rc.metrics.catalog import MetricSpec, check_names, describe
from verl_rc.metrics.mergeable import Mean
from verl_rc.metrics.record import Metric, Reduction, reduce_metrics

__all__ = ["Mean", "Metric", "MetricSpec", "Reduction", "check_names", "describe", "reduce_metrics"]
