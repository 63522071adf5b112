"""Single steps of the real loop in a run whose workers can be told to go wrong."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import HELPERS, share_of_digits, run_overrides

from verl_rc.config.load import load_run_config
from verl_rc.records.parts import Part, Sample, token_ids
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.trainer import train
from verl_rc.trainer.cluster.engine_group import EngineGroup
from verl_rc.trainer.cluster.engine_work import AssignedRequest
from verl_rc.trainer.cluster.model_groups import ActorGroup
from verl_rc.trainer.cluster.ray_session import start_ray_in_background
from verl_rc.trainer.cluster.remote import wait_for_all
from verl_rc.trainer.services import Services
from verl_rc.trainer.setup import open_run
from verl_rc.trainer.step_record import StepRecord
from verl_rc.trainer.train import finish_step
from verl_rc.trainer.weights import Publisher


@dataclass(frozen=True)
class RealRun:
    """A run that is open."""

    services: Services
    states: list[RunState]
    """Those after each step so far."""

    @property
    def state(self) -> RunState:
        return self.states[-1]

    @property
    def publisher(self) -> Publisher:
        return Publisher(self.services, self.state)


@contextmanager
def open_faulty_run(task: dict[str, Path], folder: Path, *overrides: str) -> Iterator[RealRun]:
    """A real run in which samples of one prompt get different rewards. Ray is in this process while it
    lasts."""
    config = load_run_config([*run_overrides(task, folder), share_of_digits(folder), *overrides])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", HELPERS, prepend=":")
        patch.setattr(ActorGroup, "worker", "faulty_workers:FaultyPolicyWorker")
        patch.setattr(VllmOptions, "worker", "faulty_workers:FaultyEngine")
        with open_run(
            config, start_ray_in_background(config.ray_kwargs.ray_init, config.num_processes)
        ) as parts:
            services, state = parts
            yield RealRun(services, [state])


def real_step(run: RealRun) -> dict[str, Any]:
    """The loop itself, for one step: the weights are published, then everything of a step; returns its
    metrics."""

    def publish(services: Services, state: RunState, publisher: Publisher) -> None:
        """No canary tokens but those that the configuration asks for: the engines were proved when the run
        began."""
        publisher.publish(state.step, StepRecord())

    def finish(services: Services, state: RunState, record: StepRecord) -> None:
        run.states.append(state)
        finish_step(services, state, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "start", publish)
        patch.setattr(train, "finish_step", finish)
        try:
            train.train(replace(run.services, total_steps=run.state.step + 1), run.state)
        finally:  # the engines outlive a step that fails while they sample
            engines = run.services.engines
            engines.cancel(engines._work.unfinished(range(engines.num_engines)))
    return last_metrics(run)


def last_metrics(run: RealRun) -> dict[str, Any]:
    """Those of the last step that was logged."""
    return json.loads((run.services.folder / "metrics.jsonl").read_text().splitlines()[-1])


def plant(run: RealRun, fault: str | None) -> None:
    """Switch a fault of ``faulty_workers`` on; None: all off."""
    workers = [*run.services.engines._engines, *run.services.actor._ranks]
    wait_for_all([worker.call("plant", fault) for worker in workers])


def weights_of(run: RealRun) -> list[list[int]]:
    """Digests of the trainer's weights: equal when no optimizer step was taken."""
    return wait_for_all([rank.call("weight_digests") for rank in run.services.actor._ranks])


def move_weights(run: RealRun, distance: float) -> None:
    """As an optimizer step would that has not been published."""
    wait_for_all([rank.call("move_weights", distance) for rank in run.services.actor._ranks])


def cache_resets(run: RealRun) -> list[int]:
    """How often each engine has forgotten its cached prefixes."""
    return wait_for_all([engine.call("count_cache_resets") for engine in run.services.engines._engines])


def with_values(run: RealRun, values: Mapping[str, Any], **parts: Any) -> RealRun:
    """The run with other configuration values, by dotted keys, in its driver, and with other ``parts`` of its
    services."""
    config = run.services.config
    for key, value in values.items():
        config = _with_value(config, key.split("."), value)
    return replace(run, services=replace(run.services, config=config, **parts))


def _with_value(section: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _with_value(getattr(section, path[0]), path[1:], value)
    return section.model_copy(update={path[0]: inner})


class RetokenisingEngines(EngineGroup):
    """A run's engines behind a service that hands out texts: token ids are made from them again."""

    def __init__(self, run: RealRun) -> None:
        vars(self).update(vars(run.services.engines))
        self._run = run

    def collect(self, wait_seconds: float, replace_lost: Any = None) -> list[AssignedRequest]:
        ended = super().collect(wait_seconds, replace_lost)
        for request in ended:
            request.outcome = self._retokenised(request.sample)
        return ended

    def _retokenised(self, sample: Sample) -> Sample:
        """No longer than it was, with the log-probs that its first tokens had."""
        tokenizer, (part,) = self._run.services.tokenizer, sample.parts
        assert isinstance(part, Part)
        text = tokenizer.decode(token_ids(sample.parts), skip_special_tokens=True)
        again = tokenizer.encode(text, add_special_tokens=False)[: len(part.token_ids)] or [0]
        tokens = torch.tensor(again, dtype=torch.int32)
        return replace(sample, parts=[Part(tokens, part.log_probs[: len(again)], part.version)])
