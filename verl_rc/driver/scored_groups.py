"""Scoring whole groups, deciding what becomes of them, and joining those that a step trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.advantage.group_relative import informative_groups
from verl_rc.data.batches import RolloutBatch
from verl_rc.data.groups import Group, GroupScores, completions, joined_samples
from verl_rc.data.samples import Samples
from verl_rc.driver.sample import compared_values, decode, score_with_penalty
from verl_rc.driver.services import Services
from verl_rc.driver.step_record import StepRecord
from verl_rc.rewards import RewardError
from verl_rc.rollout.collect import build_rollout_batch


@dataclass(frozen=True)
class Baselines:
    """The greedy responses of a batch (``remax``), which are no part of it."""

    scores: Tensor
    """float32 ``[prompts]``."""
    num_tokens: int


def decide(services: Services, groups: Sequence[Group]) -> list[Group | RewardError]:
    """Score whole groups: each with its scores, ``kept`` or ``filtered``, or why one of its samples has no score."""
    scored = _scored(services, groups)
    return [
        found if isinstance(found, RewardError) else group.scored(found, "kept" if _tells(services, found) else "filtered")
        for group, found in zip(groups, scored, strict=True)
    ]


def _scored(services: Services, groups: Sequence[Group]) -> list[GroupScores | RewardError]:
    rollouts = _rollouts(services, groups)
    try:
        # reward/* of a step describe its batch, not what arrived meanwhile: they go to a record that is not logged.
        samples = score_with_penalty(services, [group.row for group in groups], rollouts, StepRecord())
    except RewardError as error:
        if len(groups) == 1:
            return [error]
        return [found for group in groups for found in _scored(services, [group])]
    ends = torch.tensor([len(group.samples) for group in groups]).cumsum(0).tolist()
    return [_scores_of(samples, end - len(group.samples), end) for group, end in zip(groups, ends, strict=True)]


def _scores_of(samples: Samples, first: int, end: int) -> GroupScores:
    rows = slice(first, end)
    extras: Mapping[str, list[object]] = {name: column[rows] for name, column in samples.extras.items()}
    before = None if samples.unpenalised is None else samples.unpenalised[rows].clone()
    return GroupScores(samples.scores[rows].clone(), dict(extras), before)


def _tells(services: Services, scores: GroupScores) -> bool:
    """Whether a group is to be trained on: with ``algorithm.filter_groups`` its samples must differ."""
    options, count = services.config.algorithm.filter_groups, services.config.actor_rollout_ref.rollout.n
    if not options.enable:
        return True
    sampled = _first(scores, count)
    values = compared_values(sampled.values, sampled.unpenalised, sampled.extras, options.metric)
    return bool(informative_groups(values, [0] * len(values)))


def join(services: Services, groups: Sequence[Group]) -> tuple[Samples, Baselines | None]:
    """Decided groups as what a step trains on, and their greedy responses where the estimator reads those."""
    count = services.config.actor_rollout_ref.rollout.n
    sampled = [_without_greedy(group, count) for group in groups]
    rollouts = _rollouts(services, sampled)
    samples = joined_samples(sampled, rollouts, decode(services, rollouts))
    if not services.config.algorithm.estimator_reads("reward_baselines"):
        return samples, None
    scores = torch.cat([group.scores.values[count:] for group in groups if group.scores is not None])
    tokens = sum(group.num_sampled for group in groups) - sum(group.num_sampled for group in sampled)
    return replace(samples, reward_baselines=scores[rollouts.group_ids]), Baselines(scores, tokens)


def _without_greedy(group: Group, count: int) -> Group:
    scores = None if group.scores is None else _first(group.scores, count)
    return replace(group, samples=group.samples[:count], scores=scores)


def _first(scores: GroupScores, count: int) -> GroupScores:
    """Return the scores of the first ``count`` samples."""
    before = None if scores.unpenalised is None else scores.unpenalised[:count]
    return GroupScores(scores.values[:count], {name: column[:count] for name, column in scores.extras.items()}, before)


def _rollouts(services: Services, groups: Sequence[Group]) -> RolloutBatch:
    samples = [sample for group in groups for sample in group.samples]
    group_ids = [place for place, group in enumerate(groups) for _ in group.samples]
    prompts = [list(sample.prompt) for sample in samples]
    with_tools = services.config.actor_rollout_ref.rollout.multi_turn.enable
    given = completions(samples, with_tools=with_tools, width=services.config.data.max_response_length)
    return build_rollout_batch(prompts, group_ids, given, services.tokenizer.pad_token_id)
