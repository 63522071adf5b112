"""Where every sampled token went, and what the guards of training say."""

from verl_rc.metrics.catalog.spec import MetricSpec

_TOKENS = {
    "sampled": ("tokens that the policy sampled for the step's training; the sum of all accounts", None),
    "trained": ("tokens in the loss of an optimizer step that was taken (first epoch)", None),
    "rejected": ("tokens left out by rollout correction (bypass mode: in the first epoch)", None),
    "nonfinite": ("tokens in an optimizer step left out because its gradient was not finite", (0, 0)),
    "withheld": ("tokens of a batch that the actor did not train on: critic warm-up, or an alert", None),
    "filtered": ("tokens of prompts that algorithm.filter_groups dropped", None),
    "surplus": ("tokens of prompts beyond data.train_batch_size after filtering", None),
    "baseline": ("tokens of greedy responses that serve as a baseline only (remax)", None),
}
_PROMPTS = {
    "sampled": "prompts sampled for the step; the sum of the others",
    "in_batch": "prompts that the step's batch consists of",
    "filtered": "prompts that algorithm.filter_groups dropped",
    "surplus": "prompts beyond data.train_batch_size after filtering",
}

SPECS = (
    *(MetricSpec(f"ledger/{account}_tokens", "tokens", what, healthy, "ppo") for account, (what, healthy) in _TOKENS.items()),
    *(MetricSpec(f"ledger/prompts_{account}", "1", what, emitted_by="ppo") for account, what in _PROMPTS.items()),
    MetricSpec("alerts/mismatch", "1", "1 in a step with k3_kl above trainer.alerts.mismatch_limit", (0, 0), "driver"),
    MetricSpec("alerts/reward_collapse", "1", "1 in a step at which the mean score has collapsed", (0, 0), "driver"),
    MetricSpec("alerts/withheld_updates", "1", "1 in a step whose updates an alert left out", (0, 0), "driver"),
)
"""Entries of this room."""
