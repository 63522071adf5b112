"""How good the policy is on held-out prompts: headline numbers in ``val-core``, the rest in ``val-aux``."""

from verl_rc.metrics.catalog.spec import MetricSpec, spread

_AGGREGATES = {
    "mean@{n}": "mean over prompts of the mean of n samples",
    "std@{n}": "mean over prompts of the standard deviation of n samples",
    "best@{n}/mean": "mean over prompts of the expected best of n samples",
    "best@{n}/std": "mean over prompts of the bootstrap standard deviation of the best of n samples",
    "worst@{n}/mean": "mean over prompts of the expected worst of n samples",
    "worst@{n}/std": "mean over prompts of the bootstrap standard deviation of the worst of n samples",
    "maj@{n}/mean": "mean over prompts of the expected value of the majority answer among n samples",
    "maj@{n}/std": "mean over prompts of the bootstrap standard deviation of that value",
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
    *spread("val-aux/num_turns", "1", "validation sequences of the number of turns", "driver"),
)
"""Entries of this room."""
