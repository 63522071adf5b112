"""R8: at which operation an engine parts from the trainer, and whether by more than its precision rounds.

Every operation behind a fault differs, and in bfloat16 nearly all do without one. So each is compared with
the trainer's code in float32, for the engine and for the trainer's code in the engine's precision.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from verl_rc.config.models import torch_name
from verl_rc.config.run import RunConfig
from verl_rc.distributed.child_process import ChildProcess
from verl_rc.insight.replay.engine import environment_of_engine, options_of_run
from verl_rc.metrics.bounds import BOUNDS
from verl_rc.preflight.captured_trainer import ComparedOperation
from verl_rc.workers.environment import trainer_environment
from verl_rc.workers.host import usable_cores

_NUM_TOKENS = 8
"""Sampled behind each prompt."""
_SMALLEST = 1e-4
"""Relative: an operation in float32 rounds by 1e-7, one behind many layers by 1e-5."""


@dataclass(frozen=True)
class Parting:
    """Where the two sides part."""

    first: str = ""
    """The first operation that differs at all; empty: none."""
    beyond: str = ""
    """The first that is farther than rounding makes; empty: none."""
    gap: float = 0.0
    """Of ``beyond``, the engine's relative distance from the trainer's code in float32."""
    rounding: float = 0.0
    """Of the same operation, that of the trainer's code in the engine's precision."""


def find_parting(config: RunConfig, model_folder: str, prompts: list[list[int]]) -> Parting:
    """Sample behind ``prompts`` with an engine built as the run's was, and compare what it computed."""
    dtype, exact = torch_name(config.actor_rollout_ref.rollout.dtype), config.actor_rollout_ref.exact
    with tempfile.TemporaryDirectory() as folder:
        of_engine, of_trainer = f"{folder}/engine.pt", f"{folder}/trainer.pt"
        engine = ChildProcess(
            "verl_rc.rollout.vllm.captured:CapturingEngine",
            environment_of_engine(config),
            options=options_of_run(config, model_folder, caches=False),
        )
        try:
            engine.call("sample", prompts, min(_NUM_TOKENS, config.data.max_response_length), of_engine)
        finally:
            engine.end()
        alike, plain = (_trainer(model_folder, *how) for how in ((dtype, exact), ("float32", False)))
        try:
            different = [one for one in alike.call("compare", prompts, of_engine) if one.different_rows]
            alike.call("save_as_engine", prompts, of_engine, of_trainer)
            measured = [plain.call("compare", prompts, file) for file in (of_engine, of_trainer)]
        finally:
            alike.end()
            plain.end()
    return parting(different[0].name if different else "", *measured)


def _trainer(model_folder: str, dtype: str, exact: bool) -> ChildProcess:
    return ChildProcess(
        "verl_rc.preflight.captured_trainer:CapturedTrainer",
        trainer_environment(usable_cores(), one_node=True),
        model_path=model_folder,
        dtype=dtype,
        exact=exact,
    )


def parting(first: str, engine: Sequence[ComparedOperation], trainer: Sequence[ComparedOperation]) -> Parting:
    """The first operation of ``engine`` that is farther from float32 than ``trainer`` in its precision is."""
    roundings = {(one.name, one.decoding): one.relative_error for one in trainer}
    for one in engine:
        rounding = roundings[one.name, one.decoding]
        # NaN is far, too
        if not one.relative_error <= max(_SMALLEST, BOUNDS.far_above_floor * rounding):
            return Parting(first, one.name, one.relative_error, rounding)
    return Parting(first)
