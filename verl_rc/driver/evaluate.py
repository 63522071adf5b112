"""The validation pass: sample every held-out prompt, score it, and show some of it."""

import math
import random
from collections import defaultdict

import torch

from verl_rc.data.dataset import PromptRow
from verl_rc.driver import stages
from verl_rc.driver.run import Run
from verl_rc.driver.step_record import StepRecord
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions, request_seed


def validate(run: Run, record: StepRecord, step: int = 0) -> float:
    """Mean accuracy over all validation prompts (``val-core/<data_source>/acc/mean@N``); returned for the closing line.

    Samples are drawn with the same seeds at every step, so two validations differ by the weights alone.
    """
    options = run.config.actor_rollout_ref.rollout.val_kwargs
    rows = [row for row in run.validation_rows for _ in range(options.n)]
    requests = [
        GenerationRequest(
            row.prompt_token_ids,
            request_seed({"seed": run.config.trainer.seed, "validation_row": row.row_index, "sample": index % options.n}),
        )
        for index, row in enumerate(rows)
    ]
    sampling = SamplingOptions.for_validation(options, run.config.data.max_response_length, run.stop_token_ids)
    with record.stage("testing"):
        scored = _score_in_batches(run, rows, requests, sampling)
    accuracy, metrics = _accuracies(rows, scored, options.n)
    record.add(metrics)
    _show_samples(run, rows, scored, step)
    if run.config.trainer.validation_data_dir is not None:
        stages.write_samples(run.config.trainer.validation_data_dir, step, rows, scored)
    return accuracy


def _score_in_batches(
    run: Run, rows: list[PromptRow], requests: list[GenerationRequest], sampling: SamplingOptions
) -> stages.ScoredTexts:
    size = run.config.data.val_batch_size or len(rows)
    parts = []
    for start in range(0, len(rows), size):
        batch = requests[start : start + size]
        completions = run.engines.generate(batch, sampling)
        rollouts = stages.as_rollouts(run, batch, completions, list(range(len(batch))))
        parts.append(stages.score(run, rows[start : start + size], rollouts, StepRecord()))
    return stages.ScoredTexts.concatenated(parts)


def _accuracies(rows: list[PromptRow], scored: stages.ScoredTexts, samples: int) -> tuple[float, dict[str, float]]:
    """Mean of ``acc`` (the score where the reward function gives none) in all and by data source."""
    accuracies = scored.accuracies()
    by_source: dict[str, list[float]] = defaultdict(list)
    scores: dict[str, list[float]] = defaultdict(list)
    for row, accuracy, value in zip(rows, accuracies, scored.scores.tolist(), strict=True):
        by_source[row.data_source].append(accuracy)
        scores[row.data_source].append(value)
    metrics = {}
    for source, values in by_source.items():
        metrics[f"val-core/{source}/acc/mean@{samples}"] = math.fsum(values) / len(values)
        metrics[f"val-aux/{source}/reward/mean@{samples}"] = math.fsum(scores[source]) / len(values)
    return float(torch.tensor(accuracies, dtype=torch.float64).mean()), metrics


def _show_samples(run: Run, rows: list[PromptRow], scored: stages.ScoredTexts, step: int) -> None:
    count = min(run.config.trainer.log_val_generations, len(rows))
    if count <= 0:
        return
    chosen = sorted(random.Random(42).sample(range(len(rows)), count))
    scores = scored.scores.tolist()
    table = [[rows[i].messages[-1]["content"], scored.texts[i], str(rows[i].ground_truth), scores[i]] for i in chosen]
    run.tracker.log_table("val/generations", ["input", "output", "ground_truth", "score"], table, step)
