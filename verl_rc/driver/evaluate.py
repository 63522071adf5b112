"""The validation pass: sample every held-out prompt, score the samples, and show some of them."""

import math
import random
from collections import defaultdict
from numbers import Real
from typing import TypeGuard

from verl_rc.data.dataset import PromptRow
from verl_rc.data.samples import Samples
from verl_rc.driver import stages, weights
from verl_rc.driver.run import Run
from verl_rc.driver.sample import as_rollouts, score
from verl_rc.driver.step_record import StepRecord
from verl_rc.metrics.best_of_n import Sample, summarise_samples
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions, request_seed


def validate(run: Run, record: StepRecord, step: int = 0) -> float:
    """Sample every validation prompt ``val_kwargs.n`` times; returns the mean accuracy of all samples for the closing line.

    Every sample has the same seed at every step, so two validations differ by the weights alone.
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
        samples = _sample_in_batches(run, rows, requests, sampling, step, record)
    record.add(validation_metrics(samples, options.n))
    _show_samples(run, samples, step)
    if run.config.trainer.validation_data_dir is not None:
        stages.write_samples(run.config.trainer.validation_data_dir, samples, step)
    return math.fsum(samples.accuracies()) / len(rows)


def validation_metrics(samples: Samples, samples_per_prompt: int) -> dict[str, float]:
    """Statistics of every data source and variable: ``val-core`` for the headline, ``val-aux`` for the rest.

    Variables are the reward and the numeric columns of the reward function. A sample without a finite number (None, NaN)
    does not count; a variable that no sample of a source has is left out there. ``acc`` makes the headline where there is
    one, else the reward. Samples vote (``maj@n``) by the column ``pred``.
    """
    rows = samples.rows
    columns: dict[str, list[object]] = {**samples.extras, "reward": list(samples.scores.tolist())}
    votes = columns.pop("pred", [None] * len(rows))
    answers = [None if vote is None else str(vote) for vote in votes]
    indices_by_source: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        indices_by_source[row.data_source].append(index)
    headline = {f"mean@{samples_per_prompt}", f"best@{samples_per_prompt}/mean", f"maj@{samples_per_prompt}/mean"}
    metrics: dict[str, float] = {}
    for source, indices in indices_by_source.items():
        by_variable = {}
        for variable, column in columns.items():
            values = [(index, column[index]) for index in indices]
            finite = [Sample(rows[i].row_index, float(value), answers[i]) for i, value in values if _is_finite(value)]
            by_variable[variable] = summarise_samples(finite, samples_per_prompt)
        core_variable = "acc" if by_variable.get("acc") else "reward"
        for variable, statistics in by_variable.items():
            for name, value in statistics.items():
                group = "val-core" if variable == core_variable and name in headline else "val-aux"
                metrics[f"{group}/{source}/{variable}/{name}"] = value
    return metrics


def _is_finite(value: object) -> TypeGuard[Real]:
    return isinstance(value, Real) and math.isfinite(value)


def _sample_in_batches(
    run: Run,
    rows: list[PromptRow],
    requests: list[GenerationRequest],
    sampling: SamplingOptions,
    step: int,
    record: StepRecord,
) -> Samples:
    """``data.val_batch_size`` prompts at once, with all their samples."""
    prompts_at_once = run.config.data.val_batch_size or len(run.validation_rows)
    size = prompts_at_once * run.config.actor_rollout_ref.rollout.val_kwargs.n
    parts = []
    for start in range(0, len(rows), size):
        batch = requests[start : start + size]
        completions = weights.generate(run, batch, sampling, step, record).result
        rollouts = as_rollouts(run, batch, completions)
        parts.append(score(run, rows[start : start + size], rollouts, StepRecord()))
    return Samples.joined(parts, run.tokenizer.pad_token_id)


def _show_samples(run: Run, samples: Samples, step: int) -> None:
    """``trainer.log_val_generations`` samples of the same prompts at every step, the samples of a prompt together."""
    count = run.config.trainer.log_val_generations
    if count == 0:
        return
    samples_per_prompt = len(samples) // len(run.validation_rows)
    num_prompts = min(math.ceil(count / samples_per_prompt), len(run.validation_rows))
    prompts = sorted(random.Random(42).sample(range(len(run.validation_rows)), num_prompts))
    chosen = [prompt * samples_per_prompt + sample for prompt in prompts for sample in range(samples_per_prompt)][:count]
    rows, scores = samples.rows, samples.scores.tolist()
    table = [[rows[i].messages[-1]["content"], samples.texts[i], str(rows[i].ground_truth), scores[i]] for i in chosen]
    run.tracker.log_table("val/generations", ["input", "output", "ground_truth", "score"], table, step)
