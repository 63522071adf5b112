"""The record of a tool of ``verl-rc``, and what tools share: types of arguments, configurations, output."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_rc.printable import printable, write_error

if TYPE_CHECKING:
    from verl_rc.config.run import RunConfig

Options = argparse.Namespace
USER_ERROR = 2
"""Exit status for what the caller can put right; argparse uses the same."""


@dataclass(frozen=True)
class Subcommand:
    """A tool, and its arguments with their keywords of ``add_argument``."""

    run: Callable[[Options], int | None]
    """Runs the tool; returns the exit status, None for 0. ``main`` prints a ``ValueError`` or ``OSError``."""
    summary: str
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alternatives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further arguments, of which at most one may be given."""
    instead_of_further: str = ""
    """Advice for somebody who gives further arguments than these."""
    takes_configuration: bool = False
    """Whether all other arguments are a recipe or overrides, as verl_rc.main_ppo takes them."""


def path_argument(metavar: str, help_text: str, **keywords: Any) -> dict[str, Any]:
    """Keywords of ``add_argument`` for a path."""
    return {"metavar": metavar, "type": Path, "help": help_text, **keywords}


def positive_number(text: str) -> int:
    """An integer from 1 on."""
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


def step_keywords(options: Options) -> dict[str, Any]:
    """``--steps`` as keywords ``first_step`` and ``last_step``; empty where all steps are meant."""
    return {} if options.steps is None else {"first_step": options.steps[0], "last_step": options.steps[1]}


def write_lines(lines: Iterable[str]) -> None:
    """Print ``lines``."""
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))


def write_result(result: Any, as_json: bool) -> None:
    """Print the ``as_json()`` or the ``lines()`` of a tool's result."""
    write_lines([json.dumps(result.as_json(), indent=2)] if as_json else result.lines())


def quieten_libraries() -> None:
    """Silence transformers and huggingface_hub, which are imported later; the user's values stay."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def user_error(message: str) -> SystemExit:
    """Print ``message``; the exception that ends the process with ``USER_ERROR``."""
    write_error(f"{message}\n")
    return SystemExit(USER_ERROR)


def load_configuration(overrides: Sequence[str]) -> "RunConfig":
    """The configuration of a run with these overrides; the first may be a recipe, called with the others.

    Ends the process with a line for each mistake, as a run does.
    """
    from verl_rc.config.load import load_run_config
    from verl_rc.config.verl.migration import arguments_of_script, is_recipe_script

    try:
        if is_recipe_script(overrides[0]):
            overrides = arguments_of_script(overrides[0], overrides[1:])
        return load_run_config(overrides)
    except ValueError as error:
        raise user_error(f"configuration error:\n{error}") from None


STEPS_ARGUMENT = {"--steps": {"metavar": "A-B", "type": step_pair, "help": "only steps A to B"}}
"""The argument of tools that read some steps of a run."""

TRUST_ARGUMENT = {
    "--trust-remote-code": {
        "action": "store_true",
        "help": "run code that comes with the base model, whatever the run's files say about it",
    }
}
"""The argument of tools that build the model that the files of a run name."""
