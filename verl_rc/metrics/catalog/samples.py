"""Metrics of the samples: how the batch was put together, where every token went, ages, and the quality of
held-out ones."""

from verl_rc.metrics.catalog.spec import MetricSpec, spread
from verl_rc.metrics.splits import PROMPT_ACCOUNTS, TOKEN_ACCOUNTS

_LENGTHS = (
    spread("response_length", "tokens", "length of the response, over sequences"),
    MetricSpec(
        "response_length/clip_ratio",
        "1",
        "responses of data.max_response_length tokens / responses",
        (0, 0.1),
    ),
    spread("prompt_length", "tokens", "length of the prompt, over sequences"),
    MetricSpec(
        "prompt_length/clip_ratio",
        "1",
        "sequences with a prompt of data.max_prompt_length tokens / sequences",
        (0, 0.1),
    ),
    spread(
        "num_turns",
        "1",
        "number of messages (of prompt, policy and tools), over sequences",
    ),
    spread("tool_call_counts", "1", "number of tool calls, over sequences"),
    spread(
        "env/{column}",
        "of the column",
        "metric of the environment's replies, summed over turns, over sequences that have it",
    ),
    spread("env/wait_s", "s", "seconds of waiting for the environment, over sequences"),
    MetricSpec(
        "env/calls_again",
        "1",
        "calls of environments for the batch that failed and were repeated",
    ),
    MetricSpec(
        "env/failures",
        "1",
        "attempts at a group in the step that failed because an environment failed",
    ),
    MetricSpec(
        "env/hosts_lost",
        "1",
        "processes of environment.hosts lost, and replaced, since the step before",
    ),
    MetricSpec(
        "support/unrecorded_ratio",
        "1",
        "response tokens for which the sampling filter left more than max_support / response tokens",
        (0, 0.01),
    ),
    MetricSpec(
        "rollout/routed_fraction",
        "1",
        "response tokens whose experts the engine recorded and the actor replays / response tokens",
        (1, 1),
    ),
    spread("global_seqlen", "tokens", "length of prompt + response, over sequences"),
)
_TRAINING = (
    MetricSpec("training/global_step", "1", "number of the step, from 1"),
    MetricSpec("training/epoch", "1", "completed passes over the training data, from 0"),
    MetricSpec(
        "training/rollout_probs_diff_valid",
        "1",
        "1 if the batch has a response token with two finite log-probs, else 0",
        (1, 1),
    ),
    MetricSpec(
        "training/rollout_probs_diff_mean",
        "1",
        "mean over response tokens of |exp(proximal log-prob) − exp(rollout log-prob)|",
        (0, 0.005),
    ),
    MetricSpec(
        "training/rollout_probs_diff_max",
        "1",
        "maximum over response tokens of |exp(proximal log-prob) − exp(rollout log-prob)|",
    ),
    MetricSpec(
        "training/rollout_probs_diff_std",
        "1",
        "std over response tokens of |exp(proximal log-prob) − exp(rollout log-prob)|",
    ),
    MetricSpec(
        "training/rollout_actor_probs_pearson_corr",
        "1",
        "Pearson correlation over response tokens of exp(proximal log-prob) and exp(rollout log-prob)",
        (0.99, 1),
    ),
    MetricSpec(
        "training/filter_groups/evicted_samples",
        "1",
        "samples of groups dropped because they have one filter_groups.metric",
    ),
    MetricSpec(
        "training/filter_groups/discarded_surplus_samples",
        "1",
        "samples of groups that passed the filter beyond data.train_batch_size",
    ),
    MetricSpec(
        "training/filter_groups/informative_ratio",
        "1",
        "groups whose samples differ in filter_groups.metric / groups, of those scored in the step",
    ),
    MetricSpec(
        "training/filter_groups/sampled_score_mean",
        "reward",
        "mean over groups scored in the step of their mean score, before the filter",
    ),
)

BATCH = (*_LENGTHS, *_TRAINING)
"""Entries of this section."""


ACCOUNTING = (
    MetricSpec(
        "ledger/sampled_tokens",
        "tokens",
        "tokens sampled for the step; the sum of the other ledger/*_tokens",
    ),
    MetricSpec(
        "ledger/{account}_tokens",
        "tokens",
        "tokens by what became of them. "
        + "; ".join(f"{account}: {meaning}" for account, meaning in TOKEN_ACCOUNTS.items()),
    ),
    MetricSpec(
        "ledger/prompts_{prompts}",
        "1",
        "prompts by what became of them. sampled: all of the step, the sum of the others; "
        + "; ".join(f"{account}: {meaning}" for account, meaning in PROMPT_ACCOUNTS.items()),
    ),
    MetricSpec(
        "alerts/gap",
        "1",
        "1 if sync/rollout_gap_mean or sync/canary_mean_gap is above its limit, else 0",
        (0, 0),
    ),
    MetricSpec(
        "alerts/mismatch", "1", "1 if rollout_corr/k3_kl > trainer.alerts.mismatch_limit, else 0", (0, 0)
    ),
    MetricSpec(
        "alerts/cause",
        "1",
        "1 from the second step on in which the signatures name the same cause of the gap, else 0",
        (0, 0),
    ),
    MetricSpec(
        "alerts/reward_collapse",
        "1",
        "1 if best − last > max(|best| / 2, 4 standard errors), else 0; best, last: mean score "
        "over trainer.alerts.reward_window steps",
        (0, 0),
    ),
    MetricSpec(
        "alerts/withheld_updates", "1", "1 if an alert left out the updates of the step, else 0", (0, 0)
    ),
)
"""Entries of this section."""


_BEST = "best of n samples, drawn with replacement"
_WORST = _BEST.replace("best", "worst")
_VOTE = "value of the most frequent `pred` among n samples, drawn with replacement"
_MEAN = "mean over prompts of the mean of their n samples"
_DRAWN = {"best": _BEST, "worst": _WORST, "maj": _VOTE}

VALIDATION = (
    MetricSpec("val-core/{data_source}/acc/mean@{n}", "1", _MEAN),
    MetricSpec("val-core/{data_source}/reward/mean@{n}", "reward", _MEAN),
    *(
        MetricSpec(
            f"val-core/{{data_source}}/{{variable}}/{name}@{{n}}/mean",
            "of the variable",
            f"mean over prompts of the expected value of the {_DRAWN[name]}",
        )
        for name in ("best", "maj")
    ),
    MetricSpec("val-aux/{data_source}/{variable}/mean@{n}", "of the variable", _MEAN),
    MetricSpec(
        "val-aux/{data_source}/{variable}/std@{n}",
        "of the variable",
        "mean over prompts of the std (n − 1) of their n samples",
    ),
    *(
        MetricSpec(
            f"val-aux/{{data_source}}/{{variable}}/{name}@{{n}}/{{statistic}}",
            "of the variable",
            f"mean over prompts of the expected value or std of the {drawn}",
        )
        for name, drawn in _DRAWN.items()
    ),
)
"""Entries of this section."""


_SUPPLY = (
    MetricSpec(
        "trainer/idle_ratio",
        "1",
        "timing_s/gen / timing_s/step: the share of the step in which trainers wait for samples",
    ),
    MetricSpec(
        "async/group_age/max",
        "steps",
        "maximum over the batch's groups of the age of the oldest token, a greedy response (remax) included",
    ),
    MetricSpec(
        "async/group_age/bound",
        "steps",
        "⌈M (1 + K)⌉ − 1, M = trigger_parameter_sync_step, K = max_off_policy_threshold, or "
        "staleness_threshold where that is enough",
    ),
    MetricSpec("async/token_age/mean", "steps", "mean over response tokens of the age"),
    MetricSpec(
        "async/wait_for_oldest_s",
        "s",
        "seconds of timing_s/gen in which groups for a batch were there, but an older one was awaited",
    ),
    MetricSpec(
        "async/failed_groups", "1", "groups with a sample that failed in every attempt, and were replaced"
    ),
    MetricSpec("async/dropped_tokens", "tokens", "tokens of the groups dropped in the step for their age"),
    MetricSpec(
        "async/pause_seconds/{statistic}",
        "s",
        "seconds in which the weights were replaced, over busy engines",
    ),
    MetricSpec(
        "async/length_ratio",
        "1",
        "mean tokens of the trained groups / mean tokens of the sampled groups, over the run so far",
    ),
)
_VERSIONS = (
    spread(
        "training/off_policy/trajectory_spans",
        "1",
        "newest − oldest policy version of their tokens + 1, over responses",
    ),
    spread("training/off_policy/trajectory_staleness", "steps", "age of the newest token, over responses"),
    spread(
        "training/off_policy/trajectory_staleness_worst",
        "steps",
        "age of the oldest token, over responses",
    ),
    MetricSpec(
        "fully_async/partial/total_partial_num", "1", "responses with tokens of several policy versions"
    ),
    MetricSpec(
        "fully_async/partial/partial_ratio",
        "1",
        "total_partial_num / responses",
    ),
    MetricSpec(
        "fully_async/partial/max_partial_span",
        "steps",
        "training/off_policy/trajectory_spans/max − 1",
    ),
)

ASYNCHRONY = (*_SUPPLY, *_VERSIONS)
"""Metrics of asynchronous runs."""
