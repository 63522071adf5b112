"""What was sampled: how the batch was put together, where every token went, how old samples are, how good
held-out ones are."""

from verl_rc.metrics.catalog.spec import MetricSpec, spread

_LENGTHS = (
    *spread("response_length", "tokens", "sequences of the response's length", "ppo"),
    MetricSpec(
        "response_length/clip_ratio",
        "1",
        "share of responses that reached data.max_response_length",
        (0, 0.1),
        "ppo",
    ),
    MetricSpec(
        "response_length/overlong_ratio",
        "1",
        "share of responses that the overlong penalty touches",
        (0, 0.3),
        "driver",
    ),
    *spread("prompt_length", "tokens", "sequences of the prompt's length", "ppo"),
    MetricSpec(
        "prompt_length/clip_ratio",
        "1",
        "share of prompts that reached data.max_prompt_length",
        (0, 0.1),
        "ppo",
    ),
    *spread(
        "num_turns",
        "1",
        "sequences of the number of messages: the prompt, the policy's turns, the tools' answers",
        "ppo",
    ),
    *spread("tool_call_counts", "1", "sequences of the number of tool calls", "ppo"),
    *spread(
        "env/{column}",
        "of the column",
        "sequences that have it of a metric of the environment's replies, summed over the turns",
        "driver",
    ),
    *spread("env/wait_s", "s", "sequences of the time in which they waited for the environment", "driver"),
    MetricSpec(
        "env/calls_again",
        "1",
        "calls of the environment for the batch that were made once more, because one failed",
        emitted_by="driver",
    ),
    MetricSpec(
        "env/failures",
        "1",
        "times that a group failed in the step because of its environment",
        emitted_by="driver",
    ),
    MetricSpec(
        "env/hosts_lost",
        "1",
        "processes of environment.hosts that were lost and replaced since the step before",
        emitted_by="driver",
    ),
    *spread(
        "kept_set",
        "tokens",
        "response tokens with a recorded set of the size of the set that the filter has left",
        "ppo",
    ),
    MetricSpec(
        "kept_set/unrecorded_ratio",
        "1",
        "response tokens drawn from a set above max_kept_tokens / all: in no loss and no rollout_corr/*",
        (0, 0.01),
        "ppo",
    ),
    MetricSpec(
        "rollout/routed_fraction",
        "1",
        "response tokens whose experts in the engine are recorded and replayed in the actor / all",
        (1, 1),
        "ppo",
    ),
    *spread("global_seqlen", "tokens", "sequences of prompt plus response length", "ppo"),
)
_TRAINING = (
    MetricSpec("training/global_step", "1", "number of the step, from 1", emitted_by="driver"),
    MetricSpec("training/epoch", "1", "passes over the training data completed, from 0", emitted_by="driver"),
    MetricSpec(
        "training/rollout_probs_diff_valid",
        "1",
        "1 if there was a response token to compare, else 0",
        (1, 1),
        "ppo",
    ),
    MetricSpec(
        "training/rollout_probs_diff_mean",
        "1",
        "mean over response tokens of |exp(old log-prob) − exp(rollout log-prob)|",
        (0, 0.005),
        "ppo",
    ),
    MetricSpec("training/rollout_probs_diff_max", "1", "largest such difference", emitted_by="ppo"),
    MetricSpec("training/rollout_probs_diff_std", "1", "its population standard deviation", emitted_by="ppo"),
    MetricSpec(
        "training/rollout_actor_probs_pearson_corr",
        "1",
        "correlation over response tokens of the two probabilities",
        (0.99, 1),
        "ppo",
    ),
    MetricSpec(
        "training/filter_groups/evicted_samples",
        "1",
        "samples dropped because their group had one score only",
        emitted_by="driver",
    ),
    MetricSpec(
        "training/filter_groups/discarded_surplus_samples",
        "1",
        "samples beyond the batch size after filtering",
        emitted_by="driver",
    ),
    MetricSpec(
        "training/filter_groups/gen_batches",
        "1",
        "batches of prompts sampled for the step",
        emitted_by="driver",
    ),
    MetricSpec(
        "training/filter_groups/informative_ratio",
        "1",
        "share of the prompts sampled whose samples differ in filter_groups.metric",
        emitted_by="driver",
    ),
    MetricSpec(
        "training/filter_groups/sampled_score_mean",
        "reward",
        "mean score over all samples of the step, before the filter",
        emitted_by="driver",
    ),
)

BATCH = (*_LENGTHS, *_TRAINING)
"""Entries of this section."""


_TOKENS = {
    "sampled": ("tokens that the policy sampled for the step's training; the sum of all accounts", None),
    "trained": ("tokens in the loss of an optimizer step that was taken (first epoch)", None),
    "rejected": ("tokens left out by rollout correction (by the actor: in the first epoch)", None),
    "nonfinite": ("tokens in an optimizer step left out because its gradient was not finite", (0, 0)),
    "overflow": (
        "tokens in an optimizer step left out because the loss's scale was too large for float16",
        None,
    ),
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

ACCOUNTING = (
    *(
        MetricSpec(f"ledger/{account}_tokens", "tokens", what, healthy, "ppo")
        for account, (what, healthy) in _TOKENS.items()
    ),
    *(
        MetricSpec(f"ledger/prompts_{account}", "1", what, emitted_by="ppo")
        for account, what in _PROMPTS.items()
    ),
    MetricSpec(
        "alerts/gap",
        "1",
        "1 in a step with a mean gap above sync/gap_limit",
        (0, 0),
        "driver",
    ),
    MetricSpec(
        "alerts/mismatch", "1", "1 in a step with k3_kl above trainer.alerts.mismatch_limit", (0, 0), "driver"
    ),
    MetricSpec(
        "alerts/cause",
        "1",
        "1 while signatures name a cause of the gap, from its second step on",
        (0, 0),
        "driver",
    ),
    MetricSpec(
        "alerts/reward_collapse", "1", "1 in a step at which the mean score has collapsed", (0, 0), "driver"
    ),
    MetricSpec(
        "alerts/withheld_updates", "1", "1 in a step whose updates an alert left out", (0, 0), "driver"
    ),
)
"""Entries of this section."""


_DRAWN = "of n samples drawn with replacement from the prompt's"
_AGGREGATES = {
    "mean@{n}": "mean over prompts of the mean of their n samples",
    "std@{n}": "mean over prompts of the standard deviation (n − 1) of their n samples",
    "best@{n}/mean": f"mean over prompts of the expected best {_DRAWN}",
    "best@{n}/std": f"mean over prompts of the standard deviation of the best {_DRAWN}",
    "worst@{n}/mean": f"mean over prompts of the expected worst {_DRAWN}",
    "worst@{n}/std": f"mean over prompts of the standard deviation of the worst {_DRAWN}",
    "maj@{n}/mean": f"mean over prompts of the expected value of the most frequent `pred` {_DRAWN}",
    "maj@{n}/std": "mean over prompts of the standard deviation of the value of the most frequent `pred` "
    f"{_DRAWN}",
}
_CORE = ("mean@{n}", "best@{n}/mean", "maj@{n}/mean")

VALIDATION = (
    *(
        MetricSpec(
            f"val-core/{{data_source}}/{variable}/{aggregate}",
            unit,
            _AGGREGATES[aggregate],
            emitted_by="driver",
        )
        for variable, unit in (("acc", "1"), ("reward", "reward"))
        for aggregate in _CORE
    ),
    *(
        MetricSpec(
            f"val-aux/{{data_source}}/{{variable}}/{aggregate}",
            "of the variable",
            formula,
            emitted_by="driver",
        )
        for aggregate, formula in _AGGREGATES.items()
    ),
)
"""Entries of this section."""


_OF_DRIVER = tuple(
    MetricSpec(name, unit, formula, healthy, "driver")
    for name, unit, formula, healthy in (
        ("trainer/idle_ratio", "1", "timing_s/gen / timing_s/step: the trainers wait for samples", None),
        (
            "async/group_age/max",
            "steps",
            "largest age of a group of the batch: (step - 1) - version of its oldest token; equal to "
            "training/off_policy/trajectory_staleness_worst/max, but where a greedy response is the oldest",
            None,
        ),
        (
            "async/group_age/bound",
            "steps",
            "what the rule allows, ⌈M (1 + K)⌉ - 1; M: trigger_parameter_sync_step, K: "
            "max_off_policy_threshold, or staleness_threshold where that is enough; more ends the run",
            None,
        ),
        (
            "async/token_age/mean",
            "steps",
            "mean of (step - 1) - version over the batch's response tokens; see rollout_corr/token_age_mean",
            None,
        ),
        (
            "async/too_old_fraction",
            "1",
            "response tokens above async_training.max_token_age / all: left out of the loss",
            None,
        ),
        ("async/in_flight_groups", "1", "groups being sampled when the step ends", None),
        (
            "async/whole_waiting_groups",
            "1",
            "groups that are sampled and scored and wait for a later step",
            None,
        ),
        (
            "async/wait_for_oldest_s",
            "s",
            "part of timing_s/gen with enough groups, in which older ones were missing",
            None,
        ),
        ("async/failed_groups", "1", "groups that failed twice in the step and were replaced", None),
        (
            "async/dropped_tokens",
            "tokens",
            "tokens of groups that were dropped for their age in the step",
            None,
        ),
        (
            "async/pause_seconds/mean",
            "s",
            "mean over busy engines of the pause between two steps for an update",
            None,
        ),
        (
            "async/pause_seconds/max",
            "s",
            "longest such pause; to compute cut responses again comes on top",
            None,
        ),
        (
            "async/recomputed_tokens",
            "tokens",
            "prompts and responses so far that an update made engines compute again",
            None,
        ),
        (
            "async/length_ratio",
            "1",
            "mean tokens of a trained group / of a sampled one, over the run so far",
            None,
        ),
    )
)
_VERSIONS = (
    *spread(
        "training/off_policy/trajectory_spans",
        "1",
        "responses of newest - oldest version of their tokens + 1",
        "ppo",
    ),
    *spread(
        "training/off_policy/trajectory_staleness", "steps", "responses of (step - 1) - newest version", "ppo"
    ),
    *spread(
        "training/off_policy/trajectory_staleness_worst",
        "steps",
        "responses of (step - 1) - oldest version",
        "ppo",
    ),
    MetricSpec(
        "fully_async/partial/total_partial_num",
        "1",
        "responses with tokens of more than one version",
        emitted_by="ppo",
    ),
    MetricSpec("fully_async/partial/partial_ratio", "1", "share of such responses", emitted_by="ppo"),
    MetricSpec(
        "fully_async/partial/max_partial_span",
        "steps",
        "largest newest - oldest version in a response",
        emitted_by="ppo",
    ),
)

ASYNCHRONY = (*_OF_DRIVER, *_VERSIONS)
"""Metrics of asynchronous runs."""
