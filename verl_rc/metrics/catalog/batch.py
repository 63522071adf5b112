"""What was sampled: lengths, turns, and how the step's batch was put together."""

from verl_rc.metrics.catalog.spec import MetricSpec, spread

_LENGTHS = (
    *spread("response_length", "tokens", "sequences of the response's length", "ppo"),
    MetricSpec("response_length/clip_ratio", "1", "share of responses that reached data.max_response_length", (0, 0.1), "ppo"),
    MetricSpec("response_length/overlong_ratio", "1", "share of responses that the overlong penalty touches", (0, 0.3), "driver"),
    *spread("prompt_length", "tokens", "sequences of the prompt's length", "ppo"),
    MetricSpec("prompt_length/clip_ratio", "1", "share of prompts that reached data.max_prompt_length", (0, 0.1), "ppo"),
    *spread("num_turns", "1", "sequences of the number of messages: the prompt, the policy's turns, the tools' answers", "ppo"),
    *spread("tool_call_counts", "1", "sequences of the number of tool calls", "ppo"),
    *spread("global_seqlen", "tokens", "sequences of prompt plus response length", "ppo"),
)
_TRAINING = (
    MetricSpec("training/global_step", "1", "number of the step, from 1", emitted_by="driver"),
    MetricSpec("training/epoch", "1", "passes over the training data completed, from 0", emitted_by="driver"),
    MetricSpec("training/rollout_probs_diff_valid", "1", "1 if there was a response token to compare, else 0", (1, 1), "ppo"),
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
    MetricSpec("training/filter_groups/gen_batches", "1", "batches of prompts sampled for the step", emitted_by="driver"),
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

SPECS = (*_LENGTHS, *_TRAINING)
"""Entries of this room."""
