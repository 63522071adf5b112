"""What was sampled: how the batch was put together, where every token went, how old samples are, how good
held-out ones are."""

from verl_rc.metrics.catalog.spec import MetricSpec, spread

_LENGTHS = (
    *spread("response_length", "tokens", "sequences of the response's length"),
    MetricSpec(
        "response_length/clip_ratio",
        "1",
        "share of responses that reached data.max_response_length",
        (0, 0.1),
    ),
    MetricSpec(
        "response_length/overlong_ratio",
        "1",
        "share of responses that the overlong penalty touches",
        (0, 0.3),
    ),
    *spread("prompt_length", "tokens", "sequences of the prompt's length"),
    MetricSpec(
        "prompt_length/clip_ratio",
        "1",
        "share of prompts that reached data.max_prompt_length",
        (0, 0.1),
    ),
    *spread(
        "num_turns",
        "1",
        "sequences of the number of messages: the prompt, the policy's turns, the tools' answers",
    ),
    *spread("tool_call_counts", "1", "sequences of the number of tool calls"),
    *spread(
        "env/{column}",
        "of the column",
        "sequences that have it of a metric of the environment's replies, summed over the turns",
    ),
    *spread("env/wait_s", "s", "sequences of the time in which they waited for the environment"),
    MetricSpec(
        "env/calls_again",
        "1",
        "calls of the environment for the batch that were made once more, because one failed",
    ),
    MetricSpec(
        "env/failures",
        "1",
        "times that a group failed in the step because of its environment",
    ),
    MetricSpec(
        "env/hosts_lost",
        "1",
        "processes of environment.hosts that were lost and replaced since the step before",
    ),
    *spread(
        "kept_set",
        "tokens",
        "response tokens with a recorded set of the size of the set that the filter has left",
    ),
    MetricSpec(
        "kept_set/unrecorded_ratio",
        "1",
        "response tokens drawn from a set above max_kept_tokens / all: in no loss and no rollout_corr/*",
        (0, 0.01),
    ),
    MetricSpec(
        "rollout/routed_fraction",
        "1",
        "response tokens whose experts in the engine are recorded and replayed in the actor / all",
        (1, 1),
    ),
    *spread("global_seqlen", "tokens", "sequences of prompt plus response length"),
)
_TRAINING = (
    MetricSpec("training/global_step", "1", "number of the step, from 1"),
    MetricSpec("training/epoch", "1", "passes over the training data completed, from 0"),
    MetricSpec(
        "training/rollout_probs_diff_valid",
        "1",
        "1 if there was a response token to compare, else 0",
        (1, 1),
    ),
    MetricSpec(
        "training/rollout_probs_diff_mean",
        "1",
        "mean over response tokens of |exp(old log-prob) − exp(rollout log-prob)|",
        (0, 0.005),
    ),
    MetricSpec("training/rollout_probs_diff_max", "1", "largest such difference"),
    MetricSpec("training/rollout_probs_diff_std", "1", "its population standard deviation"),
    MetricSpec(
        "training/rollout_actor_probs_pearson_corr",
        "1",
        "correlation over response tokens of the two probabilities",
        (0.99, 1),
    ),
    MetricSpec(
        "training/filter_groups/evicted_samples",
        "1",
        "samples dropped because their group had one score only",
    ),
    MetricSpec(
        "training/filter_groups/discarded_surplus_samples",
        "1",
        "samples beyond the batch size after filtering",
    ),
    MetricSpec(
        "training/filter_groups/gen_batches",
        "1",
        "batches of prompts sampled for the step",
    ),
    MetricSpec(
        "training/filter_groups/informative_ratio",
        "1",
        "share of the prompts sampled whose samples differ in filter_groups.metric",
    ),
    MetricSpec(
        "training/filter_groups/sampled_score_mean",
        "reward",
        "mean score over all samples of the step, before the filter",
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
        MetricSpec(f"ledger/{account}_tokens", "tokens", what, healthy)
        for account, (what, healthy) in _TOKENS.items()
    ),
    *(MetricSpec(f"ledger/prompts_{account}", "1", what) for account, what in _PROMPTS.items()),
    MetricSpec(
        "alerts/gap",
        "1",
        "1 in a step with a mean gap above sync/gap_limit",
        (0, 0),
    ),
    MetricSpec("alerts/mismatch", "1", "1 in a step with k3_kl above trainer.alerts.mismatch_limit", (0, 0)),
    MetricSpec(
        "alerts/cause",
        "1",
        "1 while signatures name a cause of the gap, from its second step on",
        (0, 0),
    ),
    MetricSpec("alerts/reward_collapse", "1", "1 in a step at which the mean score has collapsed", (0, 0)),
    MetricSpec("alerts/withheld_updates", "1", "1 in a step whose updates an alert left out", (0, 0)),
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
        )
        for variable, unit in (("acc", "1"), ("reward", "reward"))
        for aggregate in _CORE
    ),
    *(
        MetricSpec(
            f"val-aux/{{data_source}}/{{variable}}/{aggregate}",
            "of the variable",
            formula,
        )
        for aggregate, formula in _AGGREGATES.items()
    ),
)
"""Entries of this section."""


_SUPPLY = (
    MetricSpec("trainer/idle_ratio", "1", "timing_s/gen / timing_s/step: the trainers wait for samples"),
    MetricSpec(
        "async/group_age/max",
        "steps",
        "largest age of a group of the batch: (step - 1) - version of its oldest token; equal to "
        "training/off_policy/trajectory_staleness_worst/max, but where a greedy response is the oldest",
    ),
    MetricSpec(
        "async/group_age/bound",
        "steps",
        "what the rule allows, ⌈M (1 + K)⌉ - 1; M: trigger_parameter_sync_step, K: "
        "max_off_policy_threshold, or staleness_threshold where that is enough; more ends the run",
    ),
    MetricSpec(
        "async/token_age/mean",
        "steps",
        "mean of (step - 1) - version over the batch's response tokens; see rollout_corr/token_age_mean",
    ),
    MetricSpec(
        "async/too_old_fraction",
        "1",
        "response tokens above async_training.max_token_age / all: left out of the loss",
    ),
    MetricSpec("async/in_flight_groups", "1", "groups being sampled when the step ends"),
    MetricSpec(
        "async/whole_waiting_groups", "1", "groups that are sampled and scored and wait for a later step"
    ),
    MetricSpec(
        "async/wait_for_oldest_s",
        "s",
        "part of timing_s/gen with enough groups, in which older ones were missing",
    ),
    MetricSpec("async/failed_groups", "1", "groups that failed twice in the step and were replaced"),
    MetricSpec(
        "async/dropped_tokens", "tokens", "tokens of groups that were dropped for their age in the step"
    ),
    MetricSpec(
        "async/pause_seconds/mean", "s", "mean over busy engines of the pause between two steps for an update"
    ),
    MetricSpec(
        "async/pause_seconds/max", "s", "longest such pause; to compute cut responses again comes on top"
    ),
    MetricSpec(
        "async/recomputed_tokens",
        "tokens",
        "prompts and responses so far that an update made engines compute again",
    ),
    MetricSpec(
        "async/length_ratio", "1", "mean tokens of a trained group / of a sampled one, over the run so far"
    ),
)
_VERSIONS = (
    *spread(
        "training/off_policy/trajectory_spans",
        "1",
        "responses of newest - oldest version of their tokens + 1",
    ),
    *spread("training/off_policy/trajectory_staleness", "steps", "responses of (step - 1) - newest version"),
    *spread(
        "training/off_policy/trajectory_staleness_worst",
        "steps",
        "responses of (step - 1) - oldest version",
    ),
    MetricSpec(
        "fully_async/partial/total_partial_num",
        "1",
        "responses with tokens of more than one version",
    ),
    MetricSpec("fully_async/partial/partial_ratio", "1", "share of such responses"),
    MetricSpec(
        "fully_async/partial/max_partial_span",
        "steps",
        "largest newest - oldest version in a response",
    ),
)

ASYNCHRONY = (*_SUPPLY, *_VERSIONS)
"""Metrics of asynchronous runs."""
