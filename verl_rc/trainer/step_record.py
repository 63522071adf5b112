"""A step of the loop, and its measurements: seconds per stage, busy seconds of the workers, metrics; and a
slow stage."""

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from verl_rc.algorithm.ppo.control import Control
from verl_rc.algorithm.ppo.corrector import Corrector, corrector_of
from verl_rc.algorithm.supply.ledger import Ledger
from verl_rc.config.run import RunConfig
from verl_rc.metrics import Metric, reduce_metrics
from verl_rc.metrics.sinks import Tracker
from verl_rc.metrics.trace import TRACE
from verl_rc.records.batches import Timed
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.workers.host import usable_cores
from verl_rc.runtime.workers.model_flops import ModelFlops
from verl_rc.trainer.cluster.placement import Placement
from verl_rc.trainer.log import log

P = ParamSpec("P")
R = TypeVar("R")

_PER_TOKEN_STAGES = ("gen", "ref", "teacher", "values", "adv", "update_critic", "update_actor")


@dataclass(frozen=True)
class Step:
    """A step of the loop."""

    number: int
    """Number of the step, from 1: the version of the weights after it."""
    control: Control
    """The adaptive numbers in force."""
    corrector: Corrector
    """Who corrects, by the configuration with the threshold in force."""
    record: "StepRecord"
    """The measurements of the step."""

    @classmethod
    def after(cls, state: RunState, config: RunConfig) -> "Step":
        """The step that follows ``state``; its clock begins."""
        control = Control.from_config(config.algorithm, state.control)
        correction = control.correction(config.algorithm.rollout_correction)
        corrector = corrector_of(
            correction,
            by_age=not config.async_training.is_synchronous,
            by_turn=config.actor_rollout_ref.rollout.converses,
        )
        return cls(state.step + 1, control, corrector, StepRecord())


@dataclass(frozen=True)
class StageFlops:
    """The passes of a model in a stage."""

    name: str
    """Name of the stage."""
    model: ModelFlops
    passes: int
    """Forward passes with as many products."""
    ranks: int

    def possible_fraction(self, lengths: Tensor, seconds: float) -> float:
        """FLOPs for sequences of ``lengths`` ``[B]`` tokens over those that the devices could do in
        ``seconds``."""
        return self.passes * self.model.of_forward(lengths) / (seconds * self.ranks * self.model.peak)


def stages_with_flops(config: RunConfig, models: Mapping[str, ModelFlops]) -> dict[str, StageFlops]:
    """The stages of ``perf/mfu/*``, by its last word, with the ``models`` that learn, by role.

    A backward pass has the products of a forward pass twice: with the weights, and for their gradients
    unless adapters alone are trained.
    """
    policy, ranks = config.actor_rollout_ref, config.num_ranks
    with_backward = 3 if policy.model.lora_rank == 0 else 2
    stages = {
        "actor": StageFlops("update_actor", models["actor"], with_backward * policy.actor.ppo_epochs, ranks),
        "actor_infer": StageFlops("old_log_prob", models["actor"], 1, ranks),
    }
    if "critic" in models:
        passes = 3 * config.critic.ppo_epochs
        stages["critic"] = StageFlops("update_critic", models["critic"], passes, ranks)
    return stages


@dataclass(frozen=True)
class StepTokens:
    """The tokens and devices by which speeds are computed."""

    response: int
    lengths: Tensor
    """Prompt and response tokens of each sequence, ``[B]``."""
    num_devices: int
    """Devices of all pools."""
    flops: Mapping[str, StageFlops]
    """Stages whose utilisation is reported, by its name."""

    @property
    def total(self) -> int:
        """Prompt and response tokens."""
        return int(self.lengths.sum())

    def utilisation(self, seconds: Mapping[str, float], shared_fraction: float) -> dict[str, float]:
        """``perf/mfu/*`` of the stages that ran; ``shared_fraction`` of the tokens were not computed."""
        return {
            f"perf/mfu/{name}": (1 - shared_fraction)
            * stage.possible_fraction(self.lengths, seconds[stage.name])
            for name, stage in self.flops.items()
            if stage.name in seconds
        }

    def milliseconds_per_token(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """``timing_per_token_ms/*``: generation by response tokens, other stages by all."""
        tokens = {
            stage: self.response if stage == "gen" else self.total
            for stage in _PER_TOKEN_STAGES
            if stage in seconds
        }
        return {
            f"timing_per_token_ms/{stage}": 1000 * seconds[stage] / count
            for stage, count in tokens.items()
            if count
        }


class StepRecord:
    """Collects a step's measurements; stages write, the loop reads once at the end."""

    def __init__(self) -> None:
        """Start the clock of the step."""
        self._started = time.perf_counter()
        self._began = time.time()
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds of every stage so far."""
        self._busy: dict[str, float] = defaultdict(float)
        self.values: dict[str, float] = {}
        """Final numbers by metric name; ``add`` adds some."""
        self._records: list[Metric] = []
        self.tokens: StepTokens | None = None
        """Tokens and devices of the step, for its speeds. None before the batch is known."""
        self.ledger = Ledger()
        """The fate of every token sampled for training."""
        self.engines_replaced = 0
        """Engines that were lost in the step and replaced."""
        self.requests_reissued = 0
        """Requests that an engine was lost with and another answered."""
        self.wait_stage: str | None = None
        """The stage in which an asynchronous run waits for its batch. None if the run is synchronous, and
        samples there itself."""
        self.histograms: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        """Edges and counts by name: ``counts[i]`` values lie between ``edges[i]`` and ``edges[i + 1]``."""

    @contextmanager
    def stage(self, name: str, **facts: Any) -> Iterator[None]:
        """Time a stage; it appears as ``timing_s/<name>``, and with ``facts`` in the run's trace."""
        started = time.perf_counter()
        try:
            with TRACE.driver(name, **facts):
                yield
        finally:  # an engine that is lost in it is replaced, and the step goes on
            self.seconds[name] += time.perf_counter() - started

    def timed(self, name: str, call: Callable[P, Timed[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """The answer of workers to ``call``, timed as stage ``name``, with the seconds that they computed."""
        with self.stage(name):
            answer = call(*args, **kwargs)
        self.add_busy(name, answer.busy_seconds)
        return answer.result

    def add_busy(self, name: str, seconds: float) -> None:
        """Seconds in which workers themselves computed during stage ``name``; the rest of the stage was
        transport and driver."""
        self._busy[name] += seconds

    def add(self, values: Mapping[str, float]) -> None:
        """Add final numbers by metric name. Raises ``ValueError`` for a name that has another value already;
        where several numbers make one, they are records."""
        _add_once(self.values, values)

    def add_records(self, records: Iterable[Metric]) -> None:
        """Add records, which are reduced over ranks and mini-batches when the step is logged."""
        self._records.extend(records)

    def log(self, tracker: Tracker, step: int, values: Mapping[str, float] | None = None) -> None:
        """Hand everything to the tracker, with finished ``values``. Raises ``LedgerError`` when the books do
        not balance."""
        tracker.log({**self.metrics(), **self.ledger.balanced_metrics(), **(values or {})}, step=step)
        for name, (edges, counts) in self.histograms.items():
            tracker.log_histogram(name, edges, counts, step)
        TRACE.span("driver", f"step {step}", self._began, time.time())
        TRACE.flush()

    def metrics(self) -> dict[str, float]:
        """All metrics of the step under their final names."""
        step = time.perf_counter() - self._started
        timing = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        busy = {f"timing_busy_s/{name}": seconds for name, seconds in self._busy.items()}
        metrics = {**self.values, **timing, **busy, "timing_s/step": step}
        _add_once(metrics, reduce_metrics(self._records))
        metrics["perf/time_per_step"] = step
        metrics["recovery/engines_replaced"] = float(self.engines_replaced)
        metrics["recovery/requests_reissued"] = float(self.requests_reissued)
        if self.wait_stage is not None:
            metrics["trainer/idle_ratio"] = self.seconds[self.wait_stage] / step
        if self.tokens is not None:
            metrics["perf/useful_tokens_per_second"] = self.ledger.trained_tokens / step
            metrics["perf/throughput"] = self.tokens.total / (step * self.tokens.num_devices)
            metrics |= self.tokens.milliseconds_per_token(self.seconds)
            shared_fraction = metrics.get("perf/shared_tokens_fraction", 0.0)
            metrics |= self.tokens.utilisation(self.seconds, shared_fraction)
        # Stages without workers are work, not overhead.
        driver = sum(self.seconds.get(name, 0.0) for name in ("reward", "testing", "save_checkpoint"))
        metrics["perf/overhead_fraction"] = max(0.0, 1.0 - (sum(self._busy.values()) + driver) / step)
        return metrics


def _add_once(metrics: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        earlier = metrics.setdefault(name, value)
        if earlier != value and not (math.isnan(earlier) and math.isnan(value)):
            raise ValueError(
                f"a metric must have one value in a step, but {name} is {earlier!r} and then {value!r}: give "
                "one of them another name, or add both as records with a reduction."
            )


_TIMES_LONGER = 10.0
_SHORTEST_SECONDS = 1.0
"""Shorter stages vary more than this by themselves."""


@dataclass(frozen=True)
class Pace:
    """Seconds of every stage when it first ran in this process."""

    first_seconds: Mapping[str, float] = field(default_factory=dict)
    is_reported: bool = False
    """A slow stage was reported."""

    def after_step(self, seconds: Mapping[str, float], step: int, placement: Placement) -> "Pace":
        """Log the slowest of the stages that took ten times their first step, once a run; returns the pace
        with this step."""
        first = {**seconds, **self.first_seconds}
        slowdown = {
            stage: duration / max(first[stage], 1e-9)
            for stage, duration in seconds.items()
            if duration >= _SHORTEST_SECONDS
        }
        slowest = max(slowdown, key=lambda stage: slowdown[stage], default=None)
        if self.is_reported or slowest is None or slowdown[slowest] < _TIMES_LONGER:
            return Pace(first, self.is_reported)
        log(
            "timing_s/%s took %.1f s in step %d and %.2f s when it first ran. %s",
            slowest,
            seconds[slowest],
            step,
            first[slowest],
            _likely_cause(os.getloadavg()[0], usable_cores(), placement),
        )
        return Pace(first, is_reported=True)


def _likely_cause(load: float, cores: int, placement: Placement) -> str:
    if placement.device == "cpu" and load > 1.5 * cores:
        return (
            f"The load average is {load:.1f} on {cores} cores; an engine uses {placement.engine_threads} of "
            f"them and a trainer rank {placement.trainer_threads}: other programs take the cores. "
            "docs/troubleshooting.md, Slow, has what helps."
        )
    return (
        f"The load average is {load:.1f} on {cores} cores: compare the lengths of prompts and responses of "
        "the two steps."
    )
