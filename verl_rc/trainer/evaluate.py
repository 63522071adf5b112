"""The validation pass: sample every held-out prompt, score the samples, and show some of them."""

import math
import random
from collections import defaultdict
from numbers import Real

from verl_rc.config.run import RunConfig
from verl_rc.metrics.best_of_n import ValidationSample, summarise_samples
from verl_rc.metrics.sinks import Tracker
from verl_rc.records.dataset import PromptRow
from verl_rc.records.episode import Episode
from verl_rc.records.parts import Sample, token_ids
from verl_rc.records.rollout_batch import build_rollout_batch, check_versions
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions, request_seed
from verl_rc.trainer import stages
from verl_rc.trainer.cluster.engine_group import EngineReplacer
from verl_rc.trainer.openings import Openings, OverlongOpeningError
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import StepRecord
from verl_rc.trainer.supply.scored_groups import score
from verl_rc.trainer.weights import Publisher


def validate(services: Services, publisher: Publisher, record: StepRecord, step: int) -> float:
    """Sample every validation prompt ``val_kwargs.n`` times; returns the mean accuracy of all samples for the
    closing line.

    Every sample has the same seed at every step, so two validations differ by the weights alone.
    """
    with record.stage("testing"):
        scored = _sample_in_batches(services, publisher.engine_replacer(step, record), step)
    record.add(validation_metrics(scored, services.config.actor_rollout_ref.rollout.val_kwargs.n))
    num_shown = services.config.trainer.log_val_generations
    if num_shown:
        _show_samples(services.tracker, scored, len(services.validation_rows), num_shown, step)
    if services.config.trainer.validation_data_dir is not None:
        stages.write_samples(services.config.trainer.validation_data_dir, scored, step)
    return math.fsum(scored.accuracies()) / len(scored)


def validation_metrics(scored: ScoredBatch, samples_per_prompt: int) -> dict[str, float]:
    """Statistics of every data source and variable: ``val-core`` for the headline, ``val-aux`` for the rest.

    Variables are the reward and the numeric columns of the reward function. A sample without a finite number
    (None, NaN) does not count; a variable that no sample of a source has is left out there. ``acc`` makes the
    headline where there is one, else the reward. Samples vote (``maj@n``) by the column ``pred``.
    """
    rows = scored.rows
    columns: dict[str, list[object]] = {**scored.extras, "reward": list(scored.scores.tolist())}
    votes = columns.pop("pred", [None] * len(rows))
    answers = [None if vote is None else str(vote) for vote in votes]
    indices_by_source: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        indices_by_source[row.data_source].append(index)
    headline = {
        f"mean@{samples_per_prompt}",
        f"best@{samples_per_prompt}/mean",
        f"maj@{samples_per_prompt}/mean",
    }
    metrics: dict[str, float] = {}
    for source, indices in indices_by_source.items():
        by_variable = {}
        for variable, column in columns.items():
            values = [(index, column[index]) for index in indices]
            finite = [
                ValidationSample(rows[i].row_index, float(value), answers[i])
                for i, value in values
                if isinstance(value, Real) and math.isfinite(value)
            ]
            by_variable[variable] = summarise_samples(finite, samples_per_prompt)
        core_variable = "acc" if by_variable.get("acc") else "reward"
        for variable, statistics in by_variable.items():
            for name, value in statistics.items():
                group = "val-core" if variable == core_variable and name in headline else "val-aux"
                metrics[f"{group}/{source}/{variable}/{name}"] = value
    return metrics


def _sample_in_batches(services: Services, replace_lost: EngineReplacer, step: int) -> ScoredBatch:
    """``data.val_batch_size`` prompts at once, with all their samples; the engines hold version ``step`` of
    the weights."""
    data = services.config.data
    rollout = services.config.actor_rollout_ref.rollout
    options = rollout.val_kwargs
    rows = [row for row in services.validation_rows for _ in range(options.n)]
    requests = [
        GenerationRequest(
            row.prompt_token_ids,
            request_seed(
                {
                    "seed": services.config.trainer.seed,
                    "validation_row": row.row_index,
                    "sample": index % options.n,
                }
            ),
            episode=_episode(services.config, row, index) if rollout.converses else None,
            pictures=row.pictures,
        )
        for index, row in enumerate(rows)
    ]
    sampling = SamplingOptions.for_validation(options, data.max_response_length, services.stop_token_ids)
    size = (data.val_batch_size or len(services.validation_rows)) * options.n
    samples: list[Sample] = []
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        samples += services.engines.generate(batch, sampling, replace_lost)
    rollouts = build_rollout_batch(
        [row.prompt_token_ids for row in rows],
        range(len(rows)),
        samples,
        with_tools=rollout.converses,
        pictures=[row.pictures for row in rows],
    )
    check_versions(rollouts, expected_version=step)
    responses = [token_ids(sample.parts) for sample in samples]
    scores = score(services, rows, responses, [sample.replies for sample in samples])
    return ScoredBatch(rollouts, scores.values, rows, scores.texts, scores.extras)


def _episode(config: RunConfig, row: PromptRow, index: int) -> Episode:
    """The episode of a validation sample: numbers below 0 are no group's."""
    key, seed = (-1 - index, 0, 0), _environment_seed(config.trainer.seed, row)
    return Episode(key, row.for_environment(), seed, row.opening)


def _environment_seed(seed: int, row: PromptRow) -> int:
    return request_seed({"seed": seed, "validation_row": row.row_index, "environment": 0})


def open_for_validation(rows: list[PromptRow], openings: Openings | None, seed: int) -> list[PromptRow]:
    """The rows as environments open them, if there are any; at every validation they do so alike.

    Rows that ``data.filter_overlong_prompts`` leaves out are not among them. Raises ``ValueError`` when
    another one fails, or none is left.
    """
    if openings is None:
        return rows
    opened = openings.open([(row, _environment_seed(seed, row)) for row in rows])
    opened_rows = [row for row in opened if isinstance(row, PromptRow)]
    for row in opened:
        is_overlong = isinstance(row, OverlongOpeningError) and opened_rows
        if isinstance(row, EpisodeFailedError) and not is_overlong:
            raise ValueError(str(row)) from row
    return opened_rows


def _show_samples(tracker: Tracker, scored: ScoredBatch, num_prompts: int, count: int, step: int) -> None:
    """Log ``count`` samples of the same prompts at every step, the samples of a prompt together."""
    samples_per_prompt = len(scored) // num_prompts
    num_shown_prompts = min(math.ceil(count / samples_per_prompt), num_prompts)
    prompts = sorted(random.Random(42).sample(range(num_prompts), num_shown_prompts))
    sample_indices = [
        prompt * samples_per_prompt + sample for prompt in prompts for sample in range(samples_per_prompt)
    ][:count]
    rows, scores = scored.rows, scored.scores.tolist()
    table = [
        [rows[i].prompt[-1]["content"], scored.texts[i], str(rows[i].ground_truth), scores[i]]
        for i in sample_indices
    ]
    tracker.log_table("val/generations", ["input", "output", "ground_truth", "score"], table, step)
