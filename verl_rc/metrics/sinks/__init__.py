"""Metric sinks: console, JSON lines, W&B, TensorBoard. W&B and TensorBoard are imported only when they are
opened."""

from verl_rc.metrics.sinks.local import (
    AlertCause,
    Cell,
    ConsoleSink,
    ExperimentSink,
    FinalReport,
    JsonlSink,
    MetricSink,
)
from verl_rc.metrics.sinks.tracker import Tracker, open_tracker

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
]
