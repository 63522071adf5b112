"""Every metric name a run may report: unit, formula, healthy range."""

from verl_rc.metrics.catalog.learning import LEARNING
from verl_rc.metrics.catalog.machine import SYNC, TIME
from verl_rc.metrics.catalog.rollout_corr import ROLLOUT_CORR
from verl_rc.metrics.catalog.samples import ACCOUNTING, ASYNCHRONY, BATCH, VALIDATION
from verl_rc.metrics.catalog.spec import Catalog, MetricSpec

SECTIONS: dict[str, tuple[MetricSpec, ...]] = {
    "Rollout correction": ROLLOUT_CORR,
    "Weight sync": SYNC,
    "Learning": LEARNING,
    "Samples and training": BATCH,
    "Books and alarms": ACCOUNTING,
    "Validation": VALIDATION,
    "Asynchronous training": ASYNCHRONY,
    "Time and memory": TIME,
}
"""Entries by section, in the order of docs/metrics.md."""

CATALOG = Catalog(spec for specs in SECTIONS.values() for spec in specs)
"""All of them."""

describe = CATALOG.describe
check_names = CATALOG.check_names

__all__ = ["CATALOG", "SECTIONS", "Catalog", "MetricSpec", "check_names", "describe"]
