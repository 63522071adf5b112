"""Scoring of responses by the user's function, the reward model or the built-in scorer of a data source, and
handling of failures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real

from verl_rc.algorithm.rewards import (
    FAILURE_COLUMN,
    RewardError,
    RewardOutput,
    RewardSample,
    build_reward,
    check_data_sources,
    score_on_timeout,
)
from verl_rc.config.task import RewardConfig
from verl_rc.metrics import Mean, Metric, Reduction
from verl_rc.records.dataset import PromptRow
from verl_rc.runtime.workers.reward_pool import RewardPool
from verl_rc.trainer.cluster.model_groups import RewardModel
from verl_rc.trainer.cluster.remote import wait_for_all
from verl_rc.trainer.log import log, log_wait


class ResponseScorer:
    """Scores responses; a failure stops the run or gets the score that the configuration gives it, and is
    counted."""

    def __init__(self, config: RewardConfig, pool: RewardPool | None, model: RewardModel | None) -> None:
        """``pool``: for samples whose scorer may hang (``may_hang``); ``model``: with
        ``reward.reward_model.enable``."""
        self._config = config
        self._pool = pool
        self._model = model
        self._inline = None if _has_function(config) else build_reward(config)

    def score(self, rows: Sequence[PromptRow], texts: Sequence[str]) -> list[RewardOutput]:
        """The output for each response, in order; ``rows`` are their prompts.

        Raises ``RewardError`` at the first failure without ``reward.failure_score``, naming the sample.
        """
        outputs: dict[int, RewardOutput] = {}
        failures = []
        samples, unscored = self._samples(rows, texts)
        for index, result in self._results(samples, unscored):
            if isinstance(result, RewardError):
                failures.append(result)
            outputs[index] = (
                self._failure_output(samples[index], result) if isinstance(result, RewardError) else result
            )
        if failures:
            log(
                "reward: %d of %d responses failed; one of them: %s", len(failures), len(samples), failures[0]
            )
        return [outputs[index] for index in range(len(samples))]

    def _samples(
        self, rows: Sequence[PromptRow], texts: Sequence[str]
    ) -> tuple[list[RewardSample], dict[int, RewardError]]:
        """One sample per response, with the reward model's score if the run has a model; and the error of
        each sample that the model did not score, by place."""
        answers: Sequence[float | str | None] = [None] * len(rows)
        if self._model is not None:
            answers = self._model.score(
                [
                    [*map(dict, row.prompt), {"role": "assistant", "content": text}]
                    for row, text in zip(rows, texts, strict=True)
                ]
            )
        samples = [
            RewardSample.from_row(row, text, None if isinstance(answer, str) else answer)
            for row, text, answer in zip(rows, texts, answers, strict=True)
        ]
        unscored = {
            index: RewardError(f"{answer}; this happened for {samples[index]}.")
            for index, answer in enumerate(answers)
            if isinstance(answer, str)
        }
        return samples, unscored

    def _results(
        self, samples: Sequence[RewardSample], unscored: Mapping[int, RewardError]
    ) -> Iterator[tuple[int, RewardOutput | RewardError]]:
        """The result of every sample with its place, in any order."""
        yield from unscored.items()
        indices = [index for index in range(len(samples)) if index not in unscored]
        pooled_indices = [index for index in indices if may_hang(self._config, samples[index].data_source)]
        for index in sorted(set(indices) - set(pooled_indices)):
            yield index, self._score_inline(samples[index])
        if pooled_indices:
            assert self._pool is not None
            for index, result in self._pool.results([samples[index] for index in pooled_indices]):
                yield pooled_indices[index], result

    def _score_inline(self, sample: RewardSample) -> RewardOutput | RewardError:
        if sample.reward_model_score is not None:
            return RewardOutput(sample.reward_model_score)
        assert self._inline is not None
        try:
            return self._inline(sample)
        except RewardError as error:
            return error

    def _failure_output(self, sample: RewardSample, error: RewardError) -> RewardOutput:
        """The output of a failed sample. Raises ``RewardError`` when the run is to stop."""
        built_in = score_on_timeout(sample.data_source) if self._config.uses_built_in_scorers else None
        if built_in is not None:
            return RewardOutput(built_in, {"acc": 0.0, FAILURE_COLUMN: str(error)})
        if self._config.failure_score is not None:
            return RewardOutput(self._config.failure_score, {FAILURE_COLUMN: str(error)})
        raise RewardError(
            f"{error} The run stops: correct the cause, or pass "
            "reward.failure_score=<number> to give such samples that score and count "
            "them in reward/failed_fraction."
        ) from error


def with_accuracies(extras: Mapping[str, list[object]]) -> dict[str, list[object]]:
    """Return the columns of some samples, where a failed one has an accuracy of 0 if others have one: it was
    not shown to be right."""
    if not {"acc", FAILURE_COLUMN} <= extras.keys():
        return dict(extras)
    pairs = zip(extras["acc"], extras[FAILURE_COLUMN], strict=True)
    accuracies = [0.0 if acc is None and failure is not None else acc for acc, failure in pairs]
    return {**extras, "acc": accuracies}


@contextmanager
def open_scorer(
    config: RewardConfig, sources: Mapping[str, str], ready_timeout_seconds: float
) -> Iterator[ResponseScorer]:
    """A scorer for prompts of ``sources`` (each with the place of its first row), with its processes.

    Raises ``ValueError`` when a source has no scorer, or when the reward function or the reward model cannot
    be loaded.
    """
    if config.uses_built_in_scorers:
        check_data_sources(sources)
    model = RewardModel(config.reward_model) if config.reward_model.enable else None
    building = [] if model is None else model.build()
    pool = (
        RewardPool(config, ready_timeout_seconds)
        if any(may_hang(config, source) for source in sources)
        else None
    )
    if pool is not None and pool.hidden and _has_function(config):
        log("reward: the function does not get %s (see reward.pass_env)", ", ".join(sorted(pool.hidden)))
    try:
        if building:
            with log_wait("the reward model"):
                wait_for_all(building, ready_timeout_seconds)
        yield ResponseScorer(config, pool, model)
    finally:
        if pool is not None:
            pool.close()


def may_hang(config: RewardConfig, data_source: str) -> bool:
    """Whether a call that scores samples of a source may never return, so that it must run in a reward
    process."""
    if _has_function(config):
        return True
    return config.uses_built_in_scorers and score_on_timeout(data_source) is not None


def _has_function(config: RewardConfig) -> bool:
    """Whether a function of the user scores responses; it receives the reward model's score if there is
    one."""
    return config.custom_reward_function.path is not None


def extra_columns(outputs: Sequence[RewardOutput]) -> dict[str, list[object]]:
    """The columns of outputs beside their scores, by name; None stands where an output lacks one."""
    names = sorted({name for output in outputs for name in output.extras})
    return {name: [output.extras.get(name) for output in outputs] for name in names}


def reward_metrics(columns: Mapping[str, Sequence[object]], num_rows: int) -> list[Metric]:
    """``reward/failed_fraction``, and the spread of every numeric column over the rows that have it."""
    num_failed = sum(reason is not None for reason in columns.get(FAILURE_COLUMN, ()))
    metrics = [Metric("reward/failed_fraction", Mean(num_failed, num_rows))]
    for column, cells in sorted(columns.items()):
        values = [float(value) for value in cells if isinstance(value, Real) and math.isfinite(value)]
        if values:
            metrics += [
                Metric(f"reward/{column}/mean", Mean(math.fsum(values), len(values))),
                Metric(f"reward/{column}/max", max(values), Reduction.MAX),
                Metric(f"reward/{column}/min", min(values), Reduction.MIN),
            ]
    return metrics
