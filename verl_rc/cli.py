"""``verl-rc <subcommand>``: the tools around a training run."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

USER_ERROR = 2
"""Exit status for what the caller can put right; argparse uses the same."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments`` (default: the command line) name; returns the exit status."""
    parser = _build_parser()
    given = parser.parse_args(arguments)
    if given.subcommand is None:
        parser.print_help(sys.stderr)
        return USER_ERROR
    status: int = given.run(given)
    return status


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl-rc", description="The tools around a training run.")
    subcommands = parser.add_subparsers(title="subcommands", dest="subcommand", metavar="SUBCOMMAND")
    _add_export(subcommands)
    return parser


def _add_export(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "write a checkpoint as a Hugging Face folder, which transformers and vLLM load"
    parser = subcommands.add_parser("export", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder global_step_N of a run")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder to write; new or empty")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32", "float16"), help="precision of the weights (default: the base model's)"
    )
    parser.add_argument(
        "--model", metavar="PATH", help="where the base model is now (default: where it was when the run was started)"
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--critic", dest="part", action="store_const", const="critic", help="the value model, not the policy")
    part.add_argument(
        "--adapter", dest="part", action="store_const", const="adapter", help="the LoRA adapter alone (default: merged)"
    )
    parser.set_defaults(run=_export, part="policy")


def _export(given: argparse.Namespace) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # torch and transformers take seconds to load, for which no other subcommand and no help text should wait.
    from verl_rc.driver.export import ExportError, ExportRequest, export_checkpoint  # noqa: PLC0415

    request = ExportRequest(given.checkpoint, given.output, given.part, given.dtype, given.model)
    try:
        written = export_checkpoint(request)
    except ExportError as error:
        return _refuse("export", error)
    sys.stdout.write(f"{written}\n")
    return 0


def _refuse(subcommand: str, error: Exception) -> int:
    sys.stderr.write(f"verl-rc {subcommand}: {' '.join(str(error).split())}\n")
    return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
