"""Sampling what a step trains on: once, or until there are enough prompts whose samples differ in their
scores."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from verl_rc.advantage.group_relative import informative_groups
from verl_rc.advantage.reward_shaping import overlong_penalty
from verl_rc.checkpoint import RunState
from verl_rc.cluster.engine_group import EnginesLostError
from verl_rc.config.algorithm import REWARD_METRICS
from verl_rc.config.run import RunConfig
from verl_rc.data.batches import Completions, RolloutBatch, Timed, unpadded
from verl_rc.data.dataset import PromptRow
from verl_rc.data.samples import Samples
from verl_rc.driver import weights
from verl_rc.driver.scoring import reward_metrics
from verl_rc.driver.services import Services
from verl_rc.driver.step_record import StepRecord
from verl_rc.rewards import RewardOutput
from verl_rc.rollout.response import build_rollout_batch, check_versions, sampled_mask
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions, request_seed

_OVERLONG_COLUMNS = ("overlong_reward", "overlong")
"""What ``overlong_buffer_cfg.log`` adds to the reward function's columns."""


def sample_batch(
    services: Services, state: RunState, prompts: list[PromptRow], epoch: int, record: StepRecord
) -> Samples:
    """Responses to ``prompts`` and their scores; the engines sleep afterwards.

    With ``algorithm.filter_groups`` only prompts stay whose samples differ in their scores, and further ones
    are drawn until there are ``data.train_batch_size`` of them.
    """
    sampler = _Sampler(services, state, record)
    filtered = services.config.algorithm.filter_groups.enable
    batch = _informative_batch(sampler, prompts, epoch) if filtered else sampler.sample(prompts, epoch)
    if services.config.algorithm.estimator_reads("reward_baselines"):
        batch = replace(batch, reward_baselines=sampler.greedy_scores(batch))
    batch = with_component_scores(services, batch, record)
    sampler.finish(batch)
    return batch


class _Sampler:
    """Generates and scores for one step, and counts what that takes."""

    def __init__(self, services: Services, state: RunState, record: StepRecord) -> None:
        self.services, self.state, self.record = services, state, record
        self._response_tokens = 0
        self._busy_seconds = 0.0

    def sample(self, prompts: list[PromptRow], epoch: int) -> Samples:
        """``rollout.n`` responses per prompt, with their scores."""
        answer = generate(self.services, self.state, prompts, epoch, self.record)
        self._response_tokens += int(torch.count_nonzero(answer.result.response_mask))
        self._busy_seconds += answer.busy_seconds
        return score_with_penalty(self.services, prompts, answer.result, self.record)

    def greedy_scores(self, batch: Samples) -> Tensor:
        """One greedy response per prompt; its score for each row of the prompt, float32 ``[B]``."""
        services, record = self.services, self.record
        sampling = SamplingOptions.for_training(
            services.config.actor_rollout_ref.rollout, services.stop_token_ids
        )
        requests = [GenerationRequest(row.prompt_token_ids, seed=0) for row in batch.prompts]
        with record.stage("gen_max"):
            answer = weights.generate(
                services, self.state, requests, replace(sampling, temperature=0.0), self.state.step, record
            )
        record.add_busy("gen_max", answer.busy_seconds)
        greedy = as_rollouts(services, requests, answer.result)
        scores = score_with_penalty(services, batch.prompts, greedy, record).scores
        book_baselines(record, sampled_tokens(answer.result), scores)
        return scores[batch.rollouts.group_ids]

    def finish(self, batch: Samples) -> None:
        """Put the engines to sleep and report."""
        with (
            self.record.stage("gen"),
            suppress(EnginesLostError),
        ):  # its samples are here; the next weight update replaces it
            self.services.engines.sleep()
        self.record.add({"perf/rollout_tokens_per_second": self._response_tokens / self._busy_seconds})
        record_sampled(self.services, batch, self._response_tokens, self.record)


def _informative_batch(sampler: _Sampler, prompts: list[PromptRow], epoch: int) -> Samples:
    """Dynamic sampling: draw, sample and filter until there are enough prompts.

    Prompts that were drawn are used up: those filtered out, and those beyond the batch size, which are
    counted and come again in the next epoch. Raises ``ValueError`` when ``max_num_gen_batches`` do not give
    enough.
    """
    services, wanted = sampler.services, sampler.services.config.data.train_batch_size
    groups = services.config.algorithm.filter_groups
    drawn = [sampler.sample(prompts, epoch)]
    kept = [_informative_part(drawn[0], groups.metric)]
    while (found := sum(len(part.prompts) for part in kept)) < wanted:
        if len(drawn) == groups.max_num_gen_batches:
            raise too_few_informative(services.config, sampler.state.step + 1, found)
        epoch, further = services.prompts.draw()
        drawn.append(sampler.sample(further, epoch))
        kept.append(_informative_part(drawn[-1], groups.metric))
    samples = services.config.actor_rollout_ref.rollout.n
    num_drawn = sum(len(part.prompts) for part in drawn)
    scores = torch.cat([part.scores for part in drawn]).double()
    sampler.record.add(
        {
            "training/filter_groups/gen_batches": len(drawn),
            "training/filter_groups/evicted_samples": (num_drawn - found) * samples,
            "training/filter_groups/discarded_surplus_samples": (found - wanted) * samples,
            "training/filter_groups/informative_ratio": found / num_drawn,
            "training/filter_groups/sampled_score_mean": float(scores.mean()),
        }
    )
    informative = Samples.concatenate(
        [part for part in kept if part.prompts], services.tokenizer.pad_token_id
    )
    batch = informative.select_prompts(range(wanted))
    tokens_found = informative.num_tokens
    tokens_filtered = sum(part.num_tokens for part in drawn) - tokens_found
    sampler.record.ledger.book({"filtered": tokens_filtered, "surplus": tokens_found - batch.num_tokens})
    sampler.record.ledger.book_prompts({"filtered": num_drawn - found, "surplus": found - wanted})
    return batch


def too_few_informative(config: RunConfig, step: int, found: int) -> ValueError:
    """Return the refusal of a step for which all batches that dynamic sampling may draw gave only ``found``
    prompts."""
    groups, data = config.algorithm.filter_groups, config.data
    return ValueError(
        f"step {step} needs data.train_batch_size={data.train_batch_size} prompts whose samples differ in "
        f"{groups.metric}, but algorithm.filter_groups.max_num_gen_batches={groups.max_num_gen_batches} "
        f"batches of {data.prompts_per_draw} prompts gave {found}. The prompts may be too easy or too hard; "
        "raise the limit (0: none), or data.gen_batch_size."
    )


def _informative_part(part: Samples, metric: str) -> Samples:
    values = compared_values(part.scores, part.unpenalised, part.extras, metric)
    return part.select_prompts(informative_groups(values, part.rollouts.group_ids.tolist()))


def compared_values(
    scores: Tensor, unpenalised: Tensor | None, extras: Mapping[str, Sequence[object]], metric: str
) -> list[float]:
    """Return the ``algorithm.filter_groups.metric`` of each sample. Raises ``ValueError`` when it names no
    column of numbers."""
    given = unpenalised if metric == "score" and unpenalised is not None else scores
    return _numbers(given, extras, metric, "algorithm.filter_groups.metric")


def book_baselines(record: StepRecord, num_tokens: int, scores: Tensor) -> None:
    """Count the tokens of greedy responses, and report the mean of their scores."""
    record.ledger.sampled(num_tokens)
    record.ledger.book({"baseline": num_tokens})
    record.add({"critic/reward_baselines/mean": float(scores.double().mean())})


def record_sampled(services: Services, batch: Samples, response_tokens: int, record: StepRecord) -> None:
    """Book and count what a step trains on, of ``response_tokens`` that were sampled for it."""
    record.ledger.book_prompts({"in_batch": len(batch.prompts)})
    lengths = batch.rollouts.tokens.sequence_lengths
    record.count_tokens(response_tokens, int(lengths.sum()), services.config.num_devices)
    if services.config.reward.reward_kwargs.overlong_buffer_cfg.enable:
        penalties = _overlong_penalties(services, batch.rollouts).double()
        spread = {"mean": penalties.mean(), "min": penalties.min(), "max": penalties.max()}
        record.add({f"critic/overlong_reward/{name}": float(value) for name, value in spread.items()})
        record.add({"response_length/overlong_ratio": float((penalties < 0).double().mean())})


def score_with_penalty(
    services: Services, prompts: list[PromptRow], rollouts: RolloutBatch, record: StepRecord
) -> Samples:
    """Return the rollouts with the reward function's scores, less the overlong penalty."""
    samples = score(services, prompts, rollouts, record)
    buffer = services.config.reward.reward_kwargs.overlong_buffer_cfg
    if not buffer.enable:
        return samples
    penalties = _overlong_penalties(services, rollouts)
    extras = dict(samples.extras)
    if buffer.log:
        extras |= dict(zip(_OVERLONG_COLUMNS, (penalties.tolist(), (penalties < 0).tolist()), strict=True))
    return replace(samples, scores=samples.scores + penalties, extras=extras, unpenalised=samples.scores)


def _overlong_penalties(services: Services, rollouts: RolloutBatch) -> Tensor:
    kwargs = services.config.reward.reward_kwargs
    buffer = kwargs.overlong_buffer_cfg
    assert buffer.len is not None
    return overlong_penalty(
        rollouts.tokens.response_lengths, kwargs.max_resp_len, buffer.len, buffer.penalty_factor
    )


def with_component_scores(services: Services, samples: Samples, record: StepRecord) -> Samples:
    """Return the samples with the columns that ``gdpo`` normalises one by one, where the run has them."""
    keys = services.config.algorithm.gdpo_reward_keys
    return (
        samples
        if keys is None
        else replace(samples, component_scores=_component_scores(samples, keys, record))
    )


def _component_scores(samples: Samples, keys: list[str], record: StepRecord) -> Tensor:
    """float32 ``[B, K]``."""
    values = [_numbers(samples.scores, samples.extras, key, "algorithm.gdpo_reward_keys") for key in keys]
    columns = torch.tensor(values, dtype=torch.float32)
    for key, column in zip(keys, columns.double(), strict=True):
        record.add(
            {f"gdpo/{key}/mean": float(column.mean()), f"gdpo/{key}/std": float(column.std(correction=0))}
        )
        record.add({f"gdpo/{key}/max": float(column.max()), f"gdpo/{key}/min": float(column.min())})
    return columns.T.contiguous()


def _numbers(scores: Tensor, extras: Mapping[str, Sequence[object]], name: str, key: str) -> list[float]:
    """One finite number per sample. Raises ``ValueError`` naming the configuration ``key`` when the column
    has none."""
    if name in ("score", *REWARD_METRICS):
        given: list[float] = scores.tolist()
        return given
    values = extras.get(name, [])
    numbers = [float(value) for value in values if isinstance(value, Real) and math.isfinite(value)]
    if len(numbers) != len(scores):
        raise ValueError(
            f"{key} must name the score or a column of finite numbers that the reward function returns for "
            f"every sample, got {name!r}; it returned the columns {sorted(extras)}."
        )
    return numbers


def generate(
    services: Services, state: RunState, prompts: list[PromptRow], epoch: int, record: StepRecord
) -> Timed[RolloutBatch]:
    """Sample ``rollout.n`` responses per prompt; rows of one prompt are adjacent."""
    rollout = services.config.actor_rollout_ref.rollout
    requests = [
        GenerationRequest(row.prompt_token_ids, sample_seed(services, state.step + 1, epoch, row, sample))
        for row in prompts
        for sample in range(rollout.n)
    ]
    groups = [index for index in range(len(prompts)) for _ in range(rollout.n)]
    with record.stage("gen"):
        options = SamplingOptions.for_training(rollout, services.stop_token_ids)
        answer = weights.generate(services, state, requests, options, state.step, record)
        rollouts = as_rollouts(services, requests, answer.result, groups)
        record.ledger.sampled(sampled_tokens(answer.result), prompts=len(prompts))
        check_versions(rollouts, expected_version=state.step)
        record.add_busy("gen", answer.busy_seconds)
    return Timed(rollouts, answer.busy_seconds)


def sample_seed(
    services: Services, step: int, epoch: int, row: PromptRow, sample: int, attempt: int = 0
) -> int:
    """The seed of one response to a prompt, the same in synchronous and asynchronous runs.

    ``step`` is the one that the prompt was drawn for; ``attempt`` says how often it was sampled before, and
    failed.
    """
    identity = {
        "seed": services.config.trainer.seed,
        "step": step,
        "epoch": epoch,
        "row": row.row_index,
        "sample": sample,
    }
    return request_seed({**identity, "attempt": attempt} if attempt else identity)


def sampled_tokens(completions: Completions) -> int:
    """Tokens that the policy produced, as the engines returned them."""
    return int(torch.count_nonzero(sampled_mask(completions)))


def as_rollouts(
    services: Services,
    requests: list[GenerationRequest],
    completions: Completions,
    group_ids: Sequence[int] | None = None,
) -> RolloutBatch:
    """Requests and their completions as one batch; without ``group_ids`` each is a prompt of its own."""
    prompts = [request.prompt_token_ids for request in requests]
    ids = range(len(requests)) if group_ids is None else group_ids
    return build_rollout_batch(prompts, ids, completions, pad_token_id=services.tokenizer.pad_token_id)


def score(
    services: Services, prompts: list[PromptRow], rollouts: RolloutBatch, record: StepRecord
) -> Samples:
    """Decode every response and have it scored."""
    with record.stage("reward"):
        texts = decode(services, rollouts)
        outputs = services.scorer.score([prompts[group] for group in rollouts.group_ids.tolist()], texts)
    record.add_records(reward_metrics(outputs))
    names = sorted({name for output in outputs for name in output.extras})
    extras = {name: [output.extras.get(name) for output in outputs] for name in names}
    scores = torch.tensor([output.score for output in outputs], dtype=torch.float32)
    return Samples(rollouts, scores, prompts=prompts, texts=texts, extras=extras)


def reward_outputs(samples: Samples) -> list[RewardOutput]:
    """What the reward function said of every sample, from the columns that are kept of it; None is what it
    did not say."""
    columns = {name: column for name, column in samples.extras.items() if name not in _OVERLONG_COLUMNS}
    return [
        RewardOutput(
            score, {name: column[row] for name, column in columns.items() if column[row] is not None}
        )
        for row, score in enumerate(samples.scores.tolist())
    ]


def decode(services: Services, rollouts: RolloutBatch) -> list[str]:
    """Response texts without special tokens."""
    rows = unpadded(rollouts.tokens.responses, rollouts.tokens.response_lengths)
    texts: list[str] = services.tokenizer.batch_decode(rows, skip_special_tokens=True)
    return texts
