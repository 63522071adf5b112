"""``python -m verl_rc.main_sft key=value …``: supervised warm start on worked examples."""

import os
from pathlib import Path

from rich.console import Console

from verl_rc.config.errors import ConfigError
from verl_rc.config.folder_owner import FolderClaim
from verl_rc.config.load import run_with_config
from verl_rc.config.paths import folder_problem
from verl_rc.config.sft import SftConfig
from verl_rc.runtime.distributed.child_process import importing


def train(config: SftConfig) -> None:
    """Load what the configuration names, train, and say where the model is.

    Raises ``ConfigError`` when the model or the data cannot be used, the model could not be written, another
    run writes to its folder, or its loss stops being a number.
    """
    key, folder = "trainer.output_dir", config.trainer.output_dir
    if problem := folder_problem(key, folder):
        raise ConfigError(problem)
    with FolderClaim(Path(folder), "run", key):
        _train(config)


def _train(config: SftConfig) -> None:
    # Threads that spin while they wait cost tenfold when another process needs the core; read when torch
    # loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with importing():
        from verl_rc.runtime.workers.sft import load_sft, train_sft  # noqa: PLC0415  (torch loads only once the configuration is valid)

    console = Console(stderr=True)
    try:
        setup = load_sft(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        result = train_sft(setup, console)
    except FloatingPointError as error:
        raise ConfigError(str(error)) from error
    console.print(
        f"SFT: {result.steps} steps, held-out accuracy {result.validation.accuracy:.3f}, model in "
        f"{result.folder}",
        highlight=False,
        soft_wrap=True,
    )


def main() -> None:
    """Entry point."""
    run_with_config(SftConfig, train, prog="verl_rc.main_sft")


if __name__ == "__main__":
    main()
