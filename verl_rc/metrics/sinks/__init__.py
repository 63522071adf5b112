"""Metric sinks: console, JSON lines, TensorBoard, W&B, MLflow, SwanLab, Trackio. All but the first two are
imported only when they are opened."""

from verl_rc.metrics.sinks.local import (
    AlertCause,
    Cell,
    ConsoleSink,
    ExperimentSink,
    FinalReport,
    JsonlSink,
    MetricSink,
)
from verl_rc.metrics.sinks.tracker import Tracker, open_tracker, require_installed

__all__ = [
    "AlertCause",
    "Cell",
    "ConsoleSink",
    "ExperimentSink",
    "FinalReport",
    "JsonlSink",
    "MetricSink",
    "Tracker",
    "open_tracker",
    "require_installed",
]
