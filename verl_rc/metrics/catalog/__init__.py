"""Every metric name a run may report: unit, formula, healthy range, who reports it. Each room has its own file."""

from verl_rc.metrics.catalog import accounting, asynchrony, batch, learning, rollout_corr, sync, time, validation
from verl_rc.metrics.catalog.lookup import Catalog
from verl_rc.metrics.catalog.spec import MetricSpec

ROOMS: dict[str, tuple[MetricSpec, ...]] = {
    "Rollout correction": rollout_corr.SPECS,
    "Weight sync": sync.SPECS,
    "Learning": learning.SPECS,
    "Samples and training": batch.SPECS,
    "Books and alarms": accounting.SPECS,
    "Validation": validation.SPECS,
    "Asynchronous training": asynchrony.SPECS,
    "Time and memory": time.SPECS,
}
"""Entries by room, in the order of docs/metrics.md."""

CATALOG = Catalog(spec for specs in ROOMS.values() for spec in specs)
"""All of them."""

describe = CATALOG.describe
check_names = CATALOG.check_names

__all__ = ["CATALOG", "ROOMS", "Catalog", "MetricSpec", "check_names", "describe"]
