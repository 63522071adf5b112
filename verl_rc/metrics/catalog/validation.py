"""How good the policy is on held-out prompts: headline numbers in ``val-core``, the rest in ``val-aux``."""

from verl_rc.metrics.catalog.spec import MetricSpec

_DRAWN = "of n samples drawn with replacement from the prompt's"
_AGGREGATES = {
    "mean@{n}": "mean over prompts of the mean of their n samples",
    "std@{n}": "mean over prompts of the standard deviation (n − 1) of their n samples",
    "best@{n}/mean": f"mean over prompts of the expected best {_DRAWN}",
    "best@{n}/std": f"mean over prompts of the standard deviation of the best {_DRAWN}",
    "worst@{n}/mean": f"mean over prompts of the expected worst {_DRAWN}",
    "worst@{n}/std": f"mean over prompts of the standard deviation of the worst {_DRAWN}",
    "maj@{n}/mean": f"mean over prompts of the expected value of the most frequent `pred` {_DRAWN}",
    "maj@{n}/std": f"mean over prompts of the standard deviation of the value of the most frequent `pred` {_DRAWN}",
}
_CORE = ("mean@{n}", "best@{n}/mean", "maj@{n}/mean")

SPECS = (
    *(
        MetricSpec(f"val-core/{{data_source}}/{variable}/{aggregate}", unit, _AGGREGATES[aggregate], emitted_by="driver")
        for variable, unit in (("acc", "1"), ("reward", "reward"))
        for aggregate in _CORE
    ),
    *(
        MetricSpec(f"val-aux/{{data_source}}/{{variable}}/{aggregate}", "of the variable", formula, emitted_by="driver")
        for aggregate, formula in _AGGREGATES.items()
    ),
)
"""Entries of this room."""
