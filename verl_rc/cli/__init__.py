"""``verl-rc <subcommand>``: the tools around a training run.

A subcommand imports what it needs when it runs: no other one and no help text waits for torch, Ray or Hydra.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from verl_rc.cli import after_a_run, before_a_run
from verl_rc.cli.subcommand import USER_ERROR, Subcommand
from verl_rc.printable import print_uncaught_exceptions, write_error

SUBCOMMANDS: Mapping[str, Subcommand] = dict(
    sorted({**before_a_run.SUBCOMMANDS, **after_a_run.SUBCOMMANDS}.items())
)

_INSTEAD: Mapping[tuple[str, ...], str] = {
    ("what-if",): "rollout_corr/* say what a correction does, docs/rollout_correction.md which one to take",
    ("bench",): "python -m scripts.research.exact_track lists methods of correction, in a checkout",
    ("convert",): "report and diagnose read token records as they are written (docs/token_record.md)",
    ("diagnose", "--model"): "a run of another trainer is judged by its token records (docs/token_record.md)",
    ("doctor", "--gpu"): "HARDWARE=1gpu bash scripts/quickstart.sh trains on one GPU for two minutes",
    ("trace",): "https://ui.perfetto.dev opens the trace.json of a run with async_training.trace=True",
}
"""Advice for names that are no subcommand or option here, though somebody may type them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments`` (default: the command line) name; returns the exit status."""
    print_uncaught_exceptions()
    given = sys.argv[1:] if arguments is None else list(arguments)
    if missing := next((words for words in _INSTEAD if _names(given, words)), None):
        write_error(f"verl-rc has no `{' '.join(missing)}`: {_INSTEAD[missing]}.\n")
        return USER_ERROR
    parser = build_parser()
    options, overrides = parser.parse_known_args(given)
    if options.subcommand is None:
        parser.print_help(sys.stderr)
        return USER_ERROR
    subcommand = SUBCOMMANDS[options.subcommand]
    if subcommand.instead_of_further and overrides and not overrides[0].startswith("-"):
        write_error(f"verl-rc {options.subcommand}: {subcommand.instead_of_further}\n")
        return USER_ERROR
    if overrides and not subcommand.takes_configuration:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if subcommand.takes_configuration and not overrides:
        options.parser.print_help()
        return USER_ERROR
    options.overrides = overrides
    try:
        return subcommand.run(options) or 0
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "verl_rc":
            raise
        message = _install_advice(error.name.partition(".")[0])
    except (ValueError, OSError) as error:
        if subcommand.takes_configuration:
            raise
        message = " ".join(str(error).split())
    write_error(f"verl-rc {options.subcommand}: {message}\n")
    return USER_ERROR


def _names(given: Sequence[str], words: Sequence[str]) -> bool:
    return given[:1] == [words[0]] and set(words) <= {word.partition("=")[0] for word in given}


def _install_advice(package: str) -> str:
    """Advice for a missing package that the bare wheel does not bring."""
    if package == "torch":
        return "it needs torch, any version from 2.4 on, which is not installed here: pip install torch."
    return f"it needs {package}, which comes with the trainer: bash scripts/install.sh cpu (or gpu)."


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="verl-rc", description="The tools around a training run.")
    parsers = parser.add_subparsers(title="subcommands", dest="subcommand", metavar="SUBCOMMAND")
    for name, subcommand in SUBCOMMANDS.items():
        summary = subcommand.summary
        described: dict[str, Any] = {"help": summary, "description": f"{summary[0].upper()}{summary[1:]}."}
        if subcommand.takes_configuration:
            described |= {
                "usage": f"verl-rc {name} [RECIPE.sh] [GROUP=CHOICE ...] [KEY=VALUE ...] [OPTION ...]",
                "epilog": "Groups and keys as python -m verl_rc.main_ppo, whose --help lists the groups.",
                "allow_abbrev": False,
            }
        child = parsers.add_parser(name, **described)
        child.set_defaults(parser=child)
        for argument, keywords in subcommand.arguments.items():
            child.add_argument(argument, **keywords)
        alternatives = child.add_mutually_exclusive_group() if subcommand.alternatives else child
        for argument, keywords in subcommand.alternatives.items():
            alternatives.add_argument(argument, **keywords)
    return parser
