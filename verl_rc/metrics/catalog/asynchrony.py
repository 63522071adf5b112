"""Generation ahead of training: ages, what is under way, and which side waits. A synchronous run reports none of them."""

from verl_rc.metrics.catalog.spec import MetricSpec, spread

_OF_DRIVER = tuple(
    MetricSpec(name, unit, formula, healthy, "driver")
    for name, unit, formula, healthy in (
        ("trainer/idle_ratio", "1", "timing_s/gen / timing_s/step: the trainers wait for samples", None),
        ("async/group_age/max", "steps", "largest age of a group of the batch: (step - 1) - version of its oldest token", None),
        ("async/group_age/bound", "steps", "what the rule allows, ⌈M (1 + K)⌉ - 1; a larger age ends the run", None),
        ("async/token_age/mean", "steps", "mean of (step - 1) - version over the batch's response tokens", None),
        ("async/too_old_fraction", "1", "response tokens above async_training.max_token_age / all: left out of the loss", None),
        ("async/in_flight_groups", "1", "groups being sampled when the step ends", None),
        ("async/whole_waiting_groups", "1", "groups that are sampled and scored and wait for a later step", None),
        ("async/wait_for_oldest_s", "s", "part of timing_s/gen with enough groups, in which older ones were missing", None),
        ("async/failed_groups", "1", "groups that failed twice in the step and were replaced", None),
        ("async/dropped_tokens", "1", "tokens of groups that were dropped for their age in the step", None),
        ("async/pause_seconds/mean", "s", "mean over busy engines of the pause between two steps for an update", None),
        ("async/pause_seconds/max", "s", "longest such pause; to compute cut responses again comes on top", None),
        ("async/recomputed_tokens", "tokens", "prompts and responses so far that an update made engines compute again", None),
        ("async/length_ratio", "1", "mean tokens of a trained group / of a sampled one, over the run so far", None),
    )
)
_VERSIONS = (
    *spread("training/off_policy/trajectory_spans", "1", "responses of newest - oldest version of their tokens + 1", "ppo"),
    *spread("training/off_policy/trajectory_staleness", "steps", "responses of (step - 1) - newest version", "ppo"),
    *spread("training/off_policy/trajectory_staleness_worst", "steps", "responses of (step - 1) - oldest version", "ppo"),
    MetricSpec("fully_async/partial/total_partial_num", "1", "responses with tokens of more than one version", emitted_by="ppo"),
    MetricSpec("fully_async/partial/partial_ratio", "1", "share of such responses", emitted_by="ppo"),
    MetricSpec("fully_async/partial/max_partial_span", "steps", "largest such newest - oldest version", emitted_by="ppo"),
)

ASYNCHRONY = (*_OF_DRIVER, *_VERSIONS)
"""Metrics of asynchronous runs."""
