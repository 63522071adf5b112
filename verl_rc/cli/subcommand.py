"""A tool of ``verl-rc`` as a record, and what tools share: kinds of arguments, configurations, output."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_rc.config.run import RunConfig

Options = argparse.Namespace
USER_ERROR = 2
"""Exit status for what the caller can put right; argparse uses the same."""


@dataclass(frozen=True)
class Subcommand:
    """A tool by its name, and the arguments that it takes: for each, those of ``add_argument``."""

    run: Callable[[Options], int | None]
    """Carries it out; returns the exit status, None for 0. ``main`` prints its ``ValueError`` or
    ``OSError``."""
    summary: str
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alternatives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further arguments, of which at most one may be given."""
    takes_configuration: bool = False
    """Whether all other arguments mean a configuration: a recipe, and what verl_rc.main_ppo takes."""


def path_argument(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    """Keywords of an argument that is a path."""
    return {"metavar": metavar, "type": Path, "help": text, **more}


def positive_number(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise ValueError("it must be at least 1")
    return number


def step_pair(text: str) -> tuple[int, int]:
    """``A-B``: first and last step."""
    first, _, last = text.partition("-")
    if int(first) > int(last):
        raise ValueError("the first step must not be after the last")
    return int(first), int(last)


def precision_pair(text: str) -> tuple[str, str]:
    """``TRAINER,ENGINE``: their precisions; one means both."""
    trainer, comma, engine = text.partition(",")
    if not {trainer, engine or trainer} <= {"float32", "bfloat16", "float16"} or (comma and not engine):
        raise ValueError("they must be of float32, bfloat16 and float16")
    return trainer, engine or trainer


def step_range(options: Options) -> dict[str, Any]:
    """The steps that were asked for, as keywords; none: all."""
    return {} if options.steps is None else {"first_step": options.steps[0], "last_step": options.steps[1]}


def write_lines(lines: Iterable[str]) -> None:
    """Print."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def quieten_libraries() -> None:
    """To be called before transformers is imported; the user's values take precedence."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def refuse(message: str) -> SystemExit:
    """What to raise to end the process with this message and status."""
    sys.stderr.write(f"{message}\n")
    return SystemExit(USER_ERROR)


def configuration(overrides: Sequence[str]) -> "RunConfig":
    """What a run would get from these arguments, or from a recipe named first that is called with the others.

    Ends the process with a line for each mistake, as a run does.
    """
    from verl_rc.config.load import load_run_config
    from verl_rc.config.verl.migration import arguments_of_script, is_recipe_script

    try:
        if is_recipe_script(overrides[0]):
            overrides = arguments_of_script(overrides[0], overrides[1:])
        return load_run_config(overrides)
    except ValueError as error:
        raise refuse(f"configuration error:\n{error}") from None


STEPS = {"--steps": {"metavar": "A-B", "type": step_pair, "help": "only steps A to B"}}
"""The argument of tools that read some steps of a run."""
