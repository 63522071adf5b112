"""Whole groups are scored and decided; decided groups become what a step trains on."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from verl_rc.algorithm.advantage.group_relative import informative_groups
from verl_rc.algorithm.advantage.reward_shaping import episode_scores, overlong_penalty
from verl_rc.algorithm.rewards import ENVIRONMENT_PREFIX, FAILURE_COLUMN, OVERLONG_COLUMNS, RewardError
from verl_rc.config.algorithm import REWARD_METRICS, FilterGroupsConfig
from verl_rc.config.run import RunConfig
from verl_rc.records.batches import RolloutBatch
from verl_rc.records.dataset import PromptRow
from verl_rc.records.episode import DROPPED_METRICS, Reply
from verl_rc.records.groups import Group, Scores
from verl_rc.records.parts import token_ids
from verl_rc.records.rollout_batch import build_rollout_batch
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.trainer.scoring import ResponseScorer, extra_columns, reward_metrics, with_accuracies
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import StepRecord, StepTokens

Replies = Sequence[Reply]
_MAX_COLUMNS = 200


# whole groups


def score(
    services: Services,
    rows: Sequence[PromptRow],
    responses: Sequence[Sequence[int]],
    episodes: Sequence[Replies],
) -> Scores:
    """Decode responses without their special and stop tokens and score them, by ``environment.reward`` where
    there is an environment.

    Args:
        services: Tokenizer and reward function.
        rows: The prompt of each response.
        responses: Token ids.
        episodes: What the environment replied to the turns of each.

    Raises:
        RewardError: At the first failure without ``reward.failure_score``.
    """
    # A stop token need not be a special one.
    stops = services.stop_token_ids
    written = [[token for token in response if token not in stops] for response in responses]
    texts: list[str] = services.tokenizer.batch_decode(written, skip_special_tokens=True)
    environment = services.config.actor_rollout_ref.rollout.environment
    rows = [_with_episode_facts(row, replies) for row, replies in zip(rows, episodes, strict=True)]
    if environment.name is None:
        return _scores_of_function(services.scorer, rows, texts)
    columns, rewards = _environment_columns(episodes), _turn_rewards(episodes)
    if environment.reward == "turns":
        return Scores(episode_scores(rewards, None, "turns"), texts, columns)
    scores = _scores_of_function(services.scorer, rows, texts)
    values = episode_scores(rewards, scores.values, environment.reward)
    return Scores(values, texts, {**columns, **scores.extras})


def _with_episode_facts(row: PromptRow, replies: Replies) -> PromptRow:
    """The row with what its episode says to the reward function, if it is one."""
    if not replies:
        return row
    # the prompt, every turn, and the replies between them
    facts: dict[str, Any] = {"num_turns": 2 * len(replies)}
    for reply in replies:
        facts |= reply.extra_info
    return replace(row, extra_info={**row.extra_info, **facts})


def _turn_rewards(episodes: Sequence[Replies]) -> list[list[float]]:
    return [[reply.reward for reply in replies] for replies in episodes]


def _scores_of_function(scorer: ResponseScorer, rows: Sequence[PromptRow], texts: list[str]) -> Scores:
    outputs = scorer.score(rows, texts)
    extras = with_accuracies(extra_columns(outputs))
    return Scores(torch.tensor([output.score for output in outputs], dtype=torch.float32), texts, extras)


def _environment_columns(episodes: Sequence[Replies]) -> dict[str, list[object]]:
    """The metrics of each episode's replies, summed over its turns; None where no reply has one.

    ``acc`` keeps its name, which validation reads; others are called ``env/NAME``. Of more than 200 names the
    most frequent are shown, and ``env/dropped_metrics`` counts the others.
    """
    names = [{name for reply in replies for name in reply.metrics} for replies in episodes]
    counts = Counter(chain.from_iterable(names))
    counts.pop(DROPPED_METRICS, None)
    shown = sorted(sorted(counts), key=lambda name: -counts[name])[:_MAX_COLUMNS]
    dropped = counts.keys() - set(shown)
    columns: dict[str, list[object]] = {}
    numbers_dropped = [
        math.fsum(reply.metrics.get(DROPPED_METRICS, 0.0) for reply in replies) + len(dropped & of_episode)
        for replies, of_episode in zip(episodes, names, strict=True)
    ]
    if any(numbers_dropped):
        columns[f"{ENVIRONMENT_PREFIX}{DROPPED_METRICS}"] = list(numbers_dropped)
    for name in sorted(shown):
        values = [[one.metrics[name] for one in replies if name in one.metrics] for replies in episodes]
        column: list[object] = [math.fsum(value) if value else None for value in values]
        columns[name if name == "acc" else f"{ENVIRONMENT_PREFIX}{name}"] = column
    return columns


def score_groups(services: Services, groups: Sequence[Group]) -> list[Group | RewardError]:
    """Score whole groups: each with its scores, accepted or not, or why one of its samples has no score."""
    options = services.config.algorithm.filter_groups
    count = services.config.actor_rollout_ref.rollout.n
    return [
        scores
        if isinstance(scores, RewardError)
        else group.scored(scores, accepted=_is_informative(scores, count, options))
        for group, scores in zip(groups, _scores_of_groups(services, groups), strict=True)
    ]


def _scores_of_groups(services: Services, groups: Sequence[Group]) -> list[Scores | RewardError]:
    samples = [sample for group in groups for sample in group.samples]
    rows = [group.row for group in groups for _ in group.samples]
    responses = [token_ids(sample.response.parts) for sample in samples]
    try:
        scores = score(services, rows, responses, [sample.response.replies for sample in samples])
    except RewardError as error:
        if len(groups) == 1:
            return [error]
        return [scores for group in groups for scores in _scores_of_groups(services, [group])]
    lengths = torch.tensor([len(response) for response in responses])
    scores = _with_overlong_penalty(scores, lengths, services.config)
    ends = torch.tensor([len(group.samples) for group in groups]).cumsum(0).tolist()
    return [scores.part(end - len(group.samples), end) for group, end in zip(groups, ends, strict=True)]


def _with_overlong_penalty(scores: Scores, lengths: Tensor, config: RunConfig) -> Scores:
    """Subtract the penalty on responses of ``lengths`` ``[n]`` tokens, where the run has one."""
    buffer = config.reward.reward_kwargs.overlong_buffer_cfg
    if not buffer.enable:
        return scores
    assert buffer.len is not None
    penalties = overlong_penalty(lengths, config.data.max_response_length, buffer.len, buffer.penalty_factor)
    columns = dict(zip(OVERLONG_COLUMNS, (penalties.tolist(), (penalties < 0).tolist()), strict=True))
    extras = {**scores.extras, **(columns if buffer.log else {})}
    return replace(scores, values=scores.values + penalties, extras=extras, unpenalised=scores.values)


def _is_informative(scores: Scores, count: int, options: FilterGroupsConfig) -> bool:
    """Whether a group is to be trained on: with ``algorithm.filter_groups`` its first ``count`` samples must
    differ; a greedy one does not count."""
    if not options.enable:
        return True
    sampled = scores.part(0, count)
    unpenalised = options.metric == "score" and sampled.unpenalised is not None
    values = sampled.unpenalised if unpenalised else sampled.values
    assert values is not None
    compared = _column_values(values, sampled.extras, options.metric, "algorithm.filter_groups.metric")
    return bool(informative_groups(compared, [0] * len(compared)))


def _column_values(
    values: Tensor, extras: Mapping[str, Sequence[object]], name: str, key: str
) -> list[float]:
    """One finite number per sample. Raises ``ValueError`` naming the configuration ``key`` when the column
    has none."""
    if name in ("score", *REWARD_METRICS):
        scores: list[float] = values.tolist()
        return scores
    column = extras.get(name, [])
    if name == "acc" and FAILURE_COLUMN in extras and name not in extras:  # all of them failed
        column = [0.0 for failure in extras[FAILURE_COLUMN] if failure is not None]
    numbers = [float(value) for value in column if isinstance(value, Real) and math.isfinite(value)]
    if len(numbers) != len(values):
        raise ValueError(
            f"{key} must name the score or a column of finite numbers that the reward function returns for "
            f"every sample, got {name!r}; it returned the columns {sorted(extras)}."
        )
    return numbers


# decided groups


def join_groups(services: Services, groups: Sequence[Group]) -> ScoredBatch:
    """Decided groups as what a step trains on, with the scores of their greedy responses where the estimator
    reads those.

    Raises ``ValueError`` when ``algorithm.gdpo_reward_keys`` names a column that a group lacks.
    """
    config, rollout = services.config, services.config.actor_rollout_ref.rollout
    sampled = [group.first(rollout.n) for group in groups]
    samples = [sample for group in sampled for sample in group.samples]
    responses = [sample.response for sample in samples]
    episodes = [response.replies for response in responses]
    rewards_turns = rollout.environment.name is not None and rollout.environment.reward != "function"
    rollouts = build_rollout_batch(
        [list(sample.prompt) for sample in samples],
        [place for place, group in enumerate(sampled) for _ in group.samples],
        responses,
        with_tools=rollout.converses,
        turn_rewards=_turn_rewards(episodes) if rewards_turns else None,
        pictures=[group.row.pictures for group in sampled for _ in group.samples],
    )
    if not config.async_training.is_synchronous:  # engines are compared with each other by samples of one age
        rollouts = rollouts.become(RolloutBatch, engines=None)
    scores = Scores.joined([group.scores for group in sampled if group.scores is not None])
    # Whether others have an accuracy must not depend on which groups were scored together.
    extras = with_accuracies(scores.extras)
    baselines = components = None
    if config.algorithm.estimator_reads("reward_baselines"):
        greedy = [group.scores.values[rollout.n :] for group in groups if group.scores is not None]
        baselines = torch.cat(greedy)[rollouts.group_ids]
    if config.algorithm.gdpo_reward_keys is not None:
        columns = [
            _column_values(scores.values, extras, key, "algorithm.gdpo_reward_keys")
            for key in config.algorithm.gdpo_reward_keys
        ]
        components = torch.tensor(columns, dtype=torch.float32).T.contiguous()
    return ScoredBatch(
        rollouts,
        scores.values,
        [group.row for group in groups],
        scores.texts,
        extras,
        episodes=episodes if rollout.converses else (),
        reward_baselines=baselines,
        component_scores=components,
    )


def record_batch_of_groups(
    services: Services, scored: ScoredBatch, groups: Sequence[Group], record: StepRecord
) -> None:
    """Book and count the batch that a step trains on, and the greedy responses of its ``groups`` (``remax``),
    which are no part of it; record its rewards."""
    config, count = services.config, services.config.actor_rollout_ref.rollout.n
    # From what the engines returned, not from the batch: so tokens that it lost are missed.
    tokens = sum(sample.num_sampled for group in groups for sample in group.samples[:count])
    record.ledger.add_sampled(tokens, prompts=len(scored.prompts))
    record.ledger.book_prompts({"in_batch": len(scored.prompts)})
    record.tokens = StepTokens(tokens, scored.rollouts.sequence_lengths, config.num_devices, services.flops)
    reward_columns = {
        name: column
        for name, column in scored.extras.items()
        if name not in OVERLONG_COLUMNS and not name.startswith(ENVIRONMENT_PREFIX)
    }
    record.add_records(reward_metrics(reward_columns, len(scored)))
    record.add(environment_metrics(scored.extras))
    record.add(environment_call_metrics(scored.episodes))
    if scored.reward_baselines is not None:
        greedy = sum(sample.num_sampled for group in groups for sample in group.samples[count:])
        record.ledger.add_sampled(greedy)
        record.ledger.book({"baseline": greedy})
    if scored.component_scores is not None:
        for key, column in zip(
            config.algorithm.gdpo_reward_keys or (), scored.component_scores.T.double(), strict=True
        ):
            record.add({f"gdpo/{key}/{name}": value for name, value in _mean_max_min(column).items()})
            record.add({f"gdpo/{key}/std": float(column.std(correction=0))})


def environment_metrics(columns: Mapping[str, Sequence[object]]) -> dict[str, float]:
    """Mean, largest and smallest value of the columns of an environment, over the rows that have one."""
    metrics = dict[str, float]()
    for name in (name for name in columns if name.startswith(ENVIRONMENT_PREFIX)):
        numbers = [value for value in columns[name] if isinstance(value, float)]
        if numbers:
            values = torch.tensor(numbers, dtype=torch.float64)
            metrics |= {f"{name}/{key}": value for key, value in _mean_max_min(values).items()}
    return metrics


def environment_call_metrics(episodes: Sequence[Replies]) -> dict[str, float]:
    """Metrics of the time that episodes waited for calls of their environments, and of the calls that were
    made once more."""
    if not episodes:
        return {}
    seconds = [math.fsum(reply.waited for reply in replies) for replies in episodes]
    waits = torch.tensor(seconds, dtype=torch.float64)
    num_retries = sum(reply.asked_again for replies in episodes for reply in replies)
    waiting = {f"{ENVIRONMENT_PREFIX}wait_s/{name}": value for name, value in _mean_max_min(waits).items()}
    return {**waiting, f"{ENVIRONMENT_PREFIX}calls_again": float(num_retries)}


def _mean_max_min(values: Tensor) -> dict[str, float]:
    return {"mean": float(values.mean()), "max": float(values.max()), "min": float(values.min())}
