"""The engine's side of a replay, in a process of its own."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch
from torch import Tensor

from verl_rc.config.run import RunConfig
from verl_rc.driver.replay.rows import RecordedRows
from verl_rc.rollout.sampling import EngineOptions, engine_options
from verl_rc.workers.environment import engine_environment
from verl_rc.workers.host import usable_cores


def engine_log_probs(config: RunConfig, given: Sequence[tuple[RecordedRows, str]], device: str) -> list[Tensor]:
    """Of each rows and model folder, float32 ``[B, R]``, nats: log-probs by the prefill of an engine built as the run's was."""
    options = engine_options(config, device)
    arguments = {**options.arguments, "load_format": "auto", "enable_prefix_caching": False}
    asked = [(folder, _sequences(rows)) for rows, folder in given]
    kept = dict(os.environ)
    os.environ.update(engine_environment(usable_cores(), device, one_node=True))  # read when the process starts
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            answers = process.submit(_in_engine_process, replace(options, arguments=arguments), asked).result()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    return [_on_grid(rows, answer) for (rows, _), answer in zip(given, answers, strict=True)]


def _in_engine_process(options: EngineOptions, asked: Sequence[tuple[str, list[list[int]]]]) -> list[list[list[float]]]:
    from verl_rc.rollout.teacher_forced import prefill_log_probs  # noqa: PLC0415  (vLLM owns the threads of its process)

    return prefill_log_probs(options, asked)


def _sequences(rows: RecordedRows) -> list[list[int]]:
    tokens = rows.tokens
    sequences = []
    for row in range(len(tokens)):
        prompt = tokens.prompts[row, tokens.prompts.shape[1] - int(tokens.prompt_lengths[row]) :]
        sequences.append([*prompt.tolist(), *tokens.responses[row, : int(tokens.response_lengths[row])].tolist()])
    return sequences


def _on_grid(rows: RecordedRows, answer: Sequence[Sequence[float]]) -> Tensor:
    grid = torch.zeros(rows.tokens.responses.shape)
    for row, log_probs in enumerate(answer):
        length = int(rows.tokens.response_lengths[row])
        if length:
            grid[row, :length] = torch.tensor(log_probs[-length:])
    return grid
