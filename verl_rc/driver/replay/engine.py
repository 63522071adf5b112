"""The engine's side of a replay, in a process of its own."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verl_rc.config.run import RunConfig
from verl_rc.driver.replay.rows import RecordedRows
from verl_rc.report.bring_up.process import OtherProcess
from verl_rc.rollout.sampling import engine_options
from verl_rc.workers.environment import engine_environment
from verl_rc.workers.host import usable_cores


def engine_log_probs(config: RunConfig, given: Sequence[tuple[RecordedRows, str]], device: str) -> list[Tensor]:
    """Of each rows and model folder, float32 ``[B, R]``, nats: log-probs by the prefill of an engine built as the run's was."""
    options = engine_options(config, device)
    arguments = {**options.arguments, "load_format": "auto", "enable_prefix_caching": False}
    asked = [(folder, _sequences(rows)) for rows, folder in given]
    environment = engine_environment(usable_cores(), device, one_node=True)
    engine = OtherProcess(
        "verl_rc.rollout.teacher_forced:TeacherForcedEngine",
        environment,
        has_children=True,
        options=replace(options, model_path=asked[0][0], arguments=arguments),
    )
    try:
        answers = engine.call("log_probs", asked)
    finally:
        engine.end()
    return [_on_grid(rows, answer) for (rows, _), answer in zip(given, answers, strict=True)]


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
