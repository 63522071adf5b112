"""Preflight: whether a run can start here, before anything of it is started."""

from collections.abc import Iterator
from pathlib import Path

from verl_rc.config.run import RunConfig
from verl_rc.report.memory import model_paths
from verl_rc.report.preflight_inputs import Inputs, check_data, check_models, check_reward, check_tokenizer
from verl_rc.report.preflight_machine import (
    Finding,
    check_devices,
    check_disk,
    check_folder,
    check_fp8,
    check_memory,
    check_packages,
    check_ports,
)


def examine(config: RunConfig) -> Iterator[Finding]:
    """Every check of a valid configuration, cheap ones first. Loads no weights, starts at most a process for the
    reward function, writes nothing that stays."""
    folder, inputs = Path(str(config.trainer.default_local_dir)), Inputs()
    yield from check_packages()
    yield from check_devices(config)
    yield from check_fp8(config)
    yield from check_ports()
    yield from check_folder(folder)
    yield from check_models(config, inputs)
    yield from check_tokenizer(config, inputs)
    yield from check_data(config, inputs)
    yield from check_reward(config, inputs)
    if set(inputs.shapes) == set(model_paths(config)):
        yield from check_memory(config, inputs.shapes)
        yield from check_disk(config, inputs.shapes, folder)
    else:
        yield Finding("note", "memory and checkpoints", "not estimated: a model could not be read")
