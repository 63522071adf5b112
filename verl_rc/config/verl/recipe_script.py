"""What a shell script hands to its trainer: it is run with programs that only write their arguments down."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SUFFIX = ".sh"
_SECONDS = 20
_STARTERS = ("python", "python3", "ray", "torchrun")
"""Programs that recipes start a trainer with; the record takes their places."""
_HARMLESS = ("basename", "cat", "cut", "date", "dirname", "env", "expr", "nohup", "nproc", "realpath", "seq", "tr", "wc")
"""Programs that recipes fill their variables with, or call others through; by themselves they read and print."""
_RECORDER = """#!{bash}
printf '%s\\0' "$@" >> '{record}'
printf '\\n\\0' >> '{record}'
"""
_PRELUDE = """command_not_found_handle() { return 0; }
export -f command_not_found_handle
"""
"""Every other program that is called by its name does nothing, and succeeds."""


def is_recipe_script(argument: str) -> bool:
    """Whether a command line's argument is a shell script rather than ``key=value``."""
    return argument.endswith(SUFFIX) and "=" not in argument


def arguments_of_script(script: str, further: Sequence[str] = ()) -> list[str]:
    """The overrides and options that ``script``, called with ``further``, would start ``main_ppo`` with.

    A shell expands variables, conditions and arrays, and it is the script's own: read only scripts that you would start. Python,
    Ray and all else that is called by its name are replaced by programs that write their arguments down or do nothing. Raises
    ``ValueError`` for a script that is not there, starts no ``main_ppo`` or more than one, or does not end.
    """
    if not Path(script).is_file():
        raise ValueError(f"a recipe must be an existing shell script, got {script!r}: there is no such file")
    calls = [call for call in map(_trainer_call, _recorded(script, further)) if call is not None]
    trainers = [arguments for module, arguments in calls if module.endswith(".main_ppo")]
    if len(trainers) != 1:
        modules = ", ".join(module for module, _ in calls) or "nothing with `python -m`"
        raise ValueError(f"{script} must start main_ppo once, but it starts {modules}; pass the overrides of one run themselves")
    return trainers[0]


def _recorded(script: str, further: Sequence[str]) -> list[list[str]]:
    """The arguments of every program in ``_STARTERS`` that the script calls."""
    bash = shutil.which("bash")
    if bash is None:
        raise ValueError("a shell script can be read only where there is a bash; pass the overrides themselves")
    with tempfile.TemporaryDirectory() as folder:
        record, prelude, programs = Path(folder) / "record", Path(folder) / "prelude", Path(folder) / "programs"
        record.touch()
        prelude.write_text(_PRELUDE, encoding="utf-8")
        programs.mkdir()
        for name in _STARTERS:
            (programs / name).write_text(_RECORDER.format(bash=bash, record=record), encoding="utf-8")
            (programs / name).chmod(0o700)
        for name in ("bash", "sh"):
            (programs / name).symlink_to(bash)
        for name in _HARMLESS:
            if (program := shutil.which(name)) is not None:
                (programs / name).symlink_to(program)
        environment = {**os.environ, "PATH": str(programs), "BASH_ENV": str(prelude), "PYTHON": "python"}
        command = [bash, script, *further]
        try:
            ended = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{script} must end by itself, but did not within {_SECONDS} s; pass the overrides") from error
        text = record.read_text(encoding="utf-8")
    calls = [call.split("\0")[:-1] for call in text.split("\n\0")[:-1]]
    if not calls and ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
        raise ValueError(f"{script} must be a script that a bash can run, but it ended with: {said[-1]}")
    return calls


def _trainer_call(call: Sequence[str]) -> tuple[str, list[str]] | None:
    """Module and arguments of ``python -m module arguments``, also behind ``ray job submit … --``."""
    for position, argument in enumerate(call[:-1]):
        if argument == "-m" and re.fullmatch(r"[\w.]+", call[position + 1]):
            return call[position + 1], list(call[position + 2 :])
    return None
