"""Whether the engines hold the trainer's weights: what each sync sent, and the log-prob gap on sampled tokens."""

from verl_rc.metrics.catalog.spec import MetricSpec

SPECS = tuple(
    MetricSpec(name, unit, formula, healthy, "driver")
    for name, unit, formula, healthy in (
        ("sync/bytes", "bytes", "Σ size of the tensors sent", None),
        ("sync/tensors", "1", "number of tensors sent; equals the manifest's", None),
        (
            "sync/canary_mean_gap",
            "nats",
            "mean over generated canary tokens of |trainer − rollout log-prob|, of the engine where it is largest",
            None,
        ),
        ("sync/canary_max_gap", "nats", "largest |trainer − rollout log-prob| over generated canary tokens", None),
        (
            "sync/rollout_gap_mean",
            "nats",
            "mean over response tokens of |proximal − rollout log-prob|, before the update",
            None,
        ),
        ("sync/rollout_gap_max", "nats", "largest of the same", None),
        ("recovery/engines_replaced", "1", "engines that died or hung since the last step logged; replaced", (None, 0.0)),
        ("recovery/requests_reissued", "1", "requests that such an engine owed; its successor answered them", (None, 0.0)),
        ("sync/gap_limit", "nats", "mean gap above which the run stops: a fault, not rounding", None),
    )
)
"""Entries of this room."""
