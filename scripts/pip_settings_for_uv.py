"""Prints, one per line, the uv arguments that say the same as pip's configuration (uv does not read it)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

_REPEATED = {
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
_LATER_WINS = ("global", "install", ":env:")


def read_pip_settings(listing: str) -> dict[str, str]:
    """Reads the output of ``pip config list``: setting to value, the environment winning over the files."""
    settings: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        name, _, literal = line.partition("=")
        scope, _, key = name.rpartition(".")
        if scope not in _LATER_WINS or not literal:
            continue
        rank = _LATER_WINS.index(scope)
        if rank >= settings.get(key, (-1, ""))[0]:
            settings[key] = (rank, str(ast.literal_eval(literal)))
    return {key: value for key, (_, value) in settings.items()}


def uv_arguments(settings: dict[str, str]) -> list[str]:
    """Translates index, find-links and trusted-host settings; everything else has no bearing on what is
    found."""
    arguments = []
    if "index-url" in settings:
        arguments += ["--default-index", settings["index-url"]]
    for key, option in _REPEATED.items():
        for value in settings.get(key, "").split():
            if (
                key != "find-links" or "://" in value or Path(value).exists()
            ):  # pip passes over missing folders, uv stops
                arguments += [option, value]
    if "--index" in arguments:
        # pip takes the best version of all indexes; uv would stop at the first index that knows the name.
        arguments += ["--index-strategy", "unsafe-best-match"]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        arguments.append("--no-index")
    return arguments


def main() -> None:
    """Asks the pip of this interpreter for its settings and prints the translation."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print("\n".join(uv_arguments(read_pip_settings(listing))))


if __name__ == "__main__":
    main()
