"""Generation ahead of training in words: ages of samples, publications of weights, and which bound of
staleness is of use."""

import math
from collections.abc import Iterator

from verl_rc.algorithm.supply.step_time import MeasuredStep, WaitTotals
from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.config.run import RunConfig

_SMALL_GAIN = 1.1
"""The smallest speed-up of a step for which separate devices of engines and trainer are worth their cost."""
_BUSY_SHARE = 0.02
"""The largest share of waiting with which a trainer counts as busy."""

Row = tuple[str, str]
"""A name or symbol, and its meaning."""


def rule_of_ages(config: RunConfig) -> Iterator[Row]:
    """The ages of samples, the order in which they are trained on, and how many are held, as names and
    meanings."""
    options = config.async_training
    rollout = config.actor_rollout_ref.rollout
    oldest = options.oldest
    versions = "may have several versions" if options.cuts else "has one version"
    yield (
        "ages",
        f"a response {versions} of the weights and is 0 to {oldest} step(s) old when it is trained on, never "
        "older",
    )
    if options.resolved_order == "admitted":
        order = "in which prompts were admitted: a step waits for its last one"
    elif options.keeps_ages:
        order = "of completion, the oldest version first"
    elif options.max_off_policy_strategy == "drop":
        order = (
            f"of completion, the oldest version first; what would be older than {oldest} step(s) is dropped "
            "and replaced"
        )
    else:
        order = (
            "of completion, the oldest version first; the trainer waits for what would be older than "
            f"{oldest} step(s)"
        )
    yield "order", f"that {order}"
    count = options.groups_in_memory(config.data.train_batch_size)
    greedy_sample = " and a greedy one" if config.algorithm.estimator_reads("reward_baselines") else ""
    yield (
        "in memory",
        f"at most {count} prompts, {rollout.n} samples{greedy_sample} each, are sampled or wait",
    )
    if options.max_concurrent_rollouts is not None:
        limit = options.max_concurrent_rollouts
        yield (
            "at once",
            f"an engine works on at most {limit} samples, those that wait for tools included; the oldest "
            "begin first",
        )
    if options.max_token_age is not None:
        yield (
            "token age",
            f"tokens older than {options.max_token_age} step(s) leave the loss; the baseline keeps their "
            "samples",
        )
    timeout = options.group_timeout_seconds
    if timeout is not None:
        yield (
            "time limit",
            f"a prompt whose samples take longer than {timeout:g} s is sampled once more, then replaced",
        )


def publications(config: RunConfig) -> Iterator[Row]:
    """When weights are published, what that does to running responses, and what proves their arrival; names
    and meanings."""
    options = config.async_training
    trainer = config.trainer
    interval = options.trigger_parameter_sync_step
    canaries = config.actor_rollout_ref.rollout.sync_proof.canary_freq
    times = "after every step" if interval == 1 else f"after every {interval} steps and the last one"
    running_responses = {
        "finish": "engines finish what they have first",
        "recompute": "the weights change under running responses, whose tokens so far the engines compute "
        "again",
        "keep": "the weights change under running responses, which go on behind the keys and values of the "
        "old ones",
    }
    yield "publishing", f"{times}; {running_responses[options.on_update]}"
    is_staged = config.actor_rollout_ref.rollout.checkpoint_engine.stage_updates
    if is_staged:
        yield (
            "",
            "engines receive them beside running responses, into a second copy of the weights, and pause "
            "only to load them",
        )
    if is_staged and not options.cuts:
        yield (
            "",
            "the trainer waits for that at the next publication, at one that canaries prove, and where it "
            "saves",
        )
    if options.deterministic_steps is not None:
        yield (
            "",
            f"each engine makes {options.deterministic_steps} steps with a version and waits for the next: "
            "equal runs",
        )
    if not config.overlaps:
        yield (
            "",
            "engines share the trainer's devices: all that a version admits is sampled before its first step "
            "is trained",
        )
    elif not (options.cuts or is_staged):
        yield "", "so the steps from one publication to the next take as long as the slower of both sides"
    if interval > 1:
        yield "", "only a step that publishes is validated and saved" + _rounded(trainer.save_freq, options)
    frequency = f"every {canaries} publications and at the start" if canaries > 0 else "at the start"
    yield (
        "proof",
        "old tokens prove nothing about the engines' weights: the gap of canary tokens alone is limited, "
        f"{frequency}",
    )
    if canaries > 0 and options.deterministic_steps is None:
        yield "", "they are sampled beside the next batch and judged with it; nothing waits for them"
    if options.staleness > 1 and not (options.partial_rollout or is_staged):
        yield (
            "",
            (
                f"{float(options.staleness):g} publications ahead wait for the same end of sampling as 1: "
                "tokens get older, steps no shorter"
            ),
        )


def _rounded(frequency: int, options: AsyncTrainingConfig) -> str:
    steps = options.rounded_to_publications(frequency)
    return "" if steps == frequency else f": trainer.save_freq={frequency} is rounded up to {steps}"


def prediction(measured: MeasuredStep, options: AsyncTrainingConfig) -> Iterator[str]:
    """Sentences on the time of a step, and on how another bound would change it."""
    fastest, slowest = measured.fastest(options), measured.slowest(options)
    seconds = f"{fastest:.3g} s" if math.isclose(fastest, slowest) else f"{fastest:.3g} to {slowest:.3g} s"
    yield (
        f"a step takes {seconds}, in turns {measured.in_turns:.3g} s (sampling {measured.sampling:.3g} s, "
        f"training {measured.training:.3g} s, one side alone; publishing not counted)"
    )
    useful = measured.smallest_useful_staleness(options)
    best = measured.training if options.partial_rollout else max(measured.sampling, measured.training)
    if measured.in_turns <= _SMALL_GAIN * best:
        slower = "sampling" if measured.sampling > measured.training else "training"
        share = max(measured.sampling, measured.training) / measured.in_turns
        yield (
            f"no staleness_threshold helps: {slower} takes {share:.0%} of a step in turns, so give that side "
            "more devices"
        )
    elif options.staleness < useful:
        yield (
            f"staleness_threshold={useful} is the smallest that keeps the trainer busy; with less it may "
            "wait for samples"
        )
    elif options.staleness > useful:
        yield (
            f"staleness_threshold={useful} is the smallest useful one: with more, tokens get older and steps "
            "no shorter"
        )


def advice(waits: WaitTotals, options: AsyncTrainingConfig) -> str:
    """A sentence on how long the trainer waited, and on the smallest bound with which it would not have;
    ``waits.steps`` must be > 0."""
    share = waits.waited / waits.total
    bound = f"staleness_threshold={options.staleness_threshold:g}"
    summary = f"the trainer waited for samples {share:.0%} of the time with {bound}"
    useful = waits.smallest_useful_staleness(options)
    reason = "whole responses need more only with stage_updates"
    if options.partial_rollout:
        reason = (
            f"the slowest prompt took {waits.longest_group:.3g} s, a step without waiting "
            f"{waits.step_without_waiting:.3g} s"
        )
    if options.staleness < useful and share > _BUSY_SHARE:
        return f"{summary}; with {useful} it would not have waited: {reason}"
    if share > _BUSY_SHARE:
        return f"{summary}; engines are the slower side: more devices for them help, a larger bound does not"
    if options.staleness > useful:
        return f"{summary}; with {useful} it would not have waited either, with younger tokens: {reason}"
    return summary
