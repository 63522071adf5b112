"""What a recipe's shell hands to Python: the recipe is run with a Python that only writes its arguments
down."""

import os
import stat
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.sh"))


def arguments_of(recipe: Path, *further: str, **settings: str) -> list[str]:
    """All arguments, ``-m`` and the module first; ``settings`` are variables of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        record, stub = Path(folder) / "arguments", Path(folder) / "python"
        stub.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" > "$ARGUMENTS_FILE"\n')
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(stub),
            "ARGUMENTS_FILE": str(record),
            **settings,
        }
        subprocess.run(["bash", str(recipe), *further], env=environment, cwd=folder, check=True)
        return record.read_text().split("\0")[:-1]
