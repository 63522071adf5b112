"""The engine's side of a replay, in a separate process."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verl_rc.config.run import RunConfig
from verl_rc.data.batches import unpadded
from verl_rc.distributed.child_process import ChildProcess
from verl_rc.distributed.process_group import trainer_device
from verl_rc.exact import fix_summation_order
from verl_rc.insight.replay.rows import RecordedRows
from verl_rc.rollout.vllm.options import VllmOptions, engine_options
from verl_rc.workers.environment import engine_environment
from verl_rc.workers.host import usable_cores


class ReplayEngine:
    """An engine that is given recorded tokens; ``close`` ends its process."""

    def __init__(
        self, config: RunConfig, model_folder: str, plain: bool = False, caches: bool = False
    ) -> None:
        """Start an engine that is built as the run's was.

        Args:
            config: of the run.
            model_folder: its weights.
            plain: in float32 instead, and one row at a time.
            caches: whether it has a prefix cache.
        """
        options = options_of_run(config, model_folder, caches)
        if plain:
            changes = {"quantization": None, "kv_cache_dtype": "auto", "max_num_seqs": 1}
            options = replace(options, dtype="float32", arguments={**options.arguments, **changes})
        self._engine = ChildProcess(
            "verl_rc.rollout.vllm.teacher_forced:TeacherForcedEngine",
            environment_of_engine(config),
            options=options,
        )

    def prefilled(self, rows: RecordedRows, model_folder: str) -> Tensor:
        """float32 ``[B, R]``, nats: log-probs by its prefill with these weights."""
        return _on_grid(rows, self._engine.call("prefilled", model_folder, _token_prompts(rows)))

    def decoded(
        self, rows: RecordedRows, model_folder: str, cached_by: str | None = None
    ) -> tuple[Tensor, int]:
        """float32 ``[B, R]``, nats: log-probs token by token, with prompts shared in the prefix cache; and
        how many tokens of prompts came from the cache.

        ``cached_by``: folder of the weights that filled the cache before; None: the cache begins empty.
        """
        answer, cached = self._engine.call("decoded", model_folder, _token_prompts(rows), cached_by)
        return _on_grid(rows, answer), cached

    def close(self) -> None:
        """End the engine's process."""
        self._engine.end()


def options_of_run(config: RunConfig, model_folder: str, caches: bool) -> VllmOptions:
    """Options of the run's engine, with the weights of a folder; ``caches``: with a prefix cache."""
    options = engine_options(config, trainer_device(config.trainer.device).type)
    arguments = {**options.arguments, "load_format": "auto", "enable_prefix_caching": caches}
    return replace(options, model_path=model_folder, arguments=arguments)


def environment_of_engine(config: RunConfig) -> dict[str, str]:
    """Environment variables of the engine's process."""
    device = trainer_device(config.trainer.device).type
    if config.actor_rollout_ref.exact:
        fix_summation_order(device)
    return engine_environment(usable_cores(), device, one_node=True)


def _token_prompts(rows: RecordedRows) -> list[tuple[list[int], list[int]]]:
    """Prompt and response ids of the rows that have a response."""
    prompts, responses = rows.prompts, unpadded(rows.tokens.responses, rows.tokens.response_lengths)
    return [(prompts[row], responses[row]) for row in _rows_with_responses(rows)]


def _rows_with_responses(rows: RecordedRows) -> list[int]:
    return rows.tokens.response_lengths.nonzero()[:, 0].tolist()


def _on_grid(rows: RecordedRows, answer: Sequence[Sequence[float]]) -> Tensor:
    grid = torch.zeros(rows.tokens.responses.shape)
    for row, log_probs in zip(_rows_with_responses(rows), answer, strict=True):
        grid[row, : len(log_probs)] = torch.tensor(log_probs)
    return grid
