"""R8: the operation at which an engine diverges from the trainer by more than its precision rounds.

Every operation behind a fault differs, and in bfloat16 nearly all differ without a fault. So the engine's
operations and the trainer's in the engine's precision are both compared with the trainer's code in float32.
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
class Divergence:
    """The operation at which an engine diverges from the trainer."""

    first: str = ""
    """The first operation that differs at all; empty: none."""
    beyond_rounding: str = ""
    """The first operation that is farther from the trainer than rounding makes; empty: none."""
    gap: float = 0.0
    """Of ``beyond_rounding``, the engine's relative distance from the trainer's code in float32."""
    rounding: float = 0.0
    """Of ``beyond_rounding``, the same distance of the trainer's code in the engine's precision."""


def find_divergence(config: RunConfig, model_folder: str, prompts: list[list[int]]) -> Divergence:
    """Sample behind ``prompts`` with an engine built as the run's was, and compare what it computed."""
    dtype, exact = torch_name(config.actor_rollout_ref.rollout.dtype), config.actor_rollout_ref.exact
    with tempfile.TemporaryDirectory() as folder:
        engine_file, trainer_file = f"{folder}/engine.pt", f"{folder}/trainer.pt"
        engine = ChildProcess(
            "verl_rc.rollout.vllm.captured:CapturingEngine",
            environment_of_engine(config),
            options=options_of_run(config, model_folder, caches=False),
        )
        try:
            engine.call("sample", prompts, min(_NUM_TOKENS, config.data.max_response_length), engine_file)
        finally:
            engine.end()
        trainer, float32 = (
            _trainer(model_folder, *precision) for precision in ((dtype, exact), ("float32", False))
        )
        try:
            compared = trainer.call("compare", prompts, engine_file)
            trainer.call("save_as_engine", prompts, engine_file, trainer_file)
            engine_distances, roundings = (
                float32.call("compare", prompts, file) for file in (engine_file, trainer_file)
            )
        finally:
            trainer.end()
            float32.end()
    first = next((operation.name for operation in compared if operation.different_rows), "")
    return first_divergence(first, engine_distances, roundings)


def _trainer(model_folder: str, dtype: str, exact: bool) -> ChildProcess:
    return ChildProcess(
        "verl_rc.preflight.captured_trainer:CapturedTrainer",
        trainer_environment(usable_cores(), one_node=True),
        model_path=model_folder,
        dtype=dtype,
        exact=exact,
    )


def first_divergence(
    first: str, engine: Sequence[ComparedOperation], trainer: Sequence[ComparedOperation]
) -> Divergence:
    """The first operation of ``engine`` that is farther from float32 than ``trainer`` in its precision is.

    Args:
        first: the first operation that differs at all.
        engine: distances of the engine's operations from float32.
        trainer: distances of the trainer's, in the engine's precision.
    """
    roundings = {(operation.name, operation.decoding): operation.relative_error for operation in trainer}
    for operation in engine:
        rounding = roundings[operation.name, operation.decoding]
        # NaN is far, too
        if not operation.relative_error <= max(_SMALLEST, BOUNDS.far_above_floor * rounding):
            return Divergence(first, operation.name, operation.relative_error, rounding)
    return Divergence(first)
