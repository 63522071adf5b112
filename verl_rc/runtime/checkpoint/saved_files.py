"""Files of a checkpoint, read with one error for all that can be wrong with them."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from verl_rc.config.files import open_inside
from verl_rc.runtime.checkpoint.store import CheckpointError
from verl_rc.runtime.checkpoint.tensor_archive import read_archive


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ``CheckpointError`` when it is missing or broken."""
    try:
        with open_inside(path.parent, path) as file:
            plain = json.loads(file.read().decode())
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} must be a JSON file, but reading it gave: {error}. Use another checkpoint."
        ) from error
    if not isinstance(plain, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, got {type(plain).__name__}. Use another checkpoint."
        )
    return plain


def read_tensors(path: Path, contents: str) -> dict[str, Any]:
    """A mapping with tensors, on the CPU; ``contents`` names it. Raises ``CheckpointError`` when the file is
    missing or broken."""
    try:
        with open_inside(path.parent, path) as file:
            state = read_archive(file)
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} must hold {contents}, but reading it gave {in_one_line(error)}. Use another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} must hold {contents}, got {type(state).__name__}. Use another checkpoint."
        )
    return state


def in_one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def fields_in_one_line(error: ValueError) -> str:
    """Every field that pydantic refuses, with the reason; any other error as it is."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}, got {detail['input']!r}"
        for detail in error.errors()
    )


def missing(path: Path) -> CheckpointError:
    """The error for a file that is not there."""
    return CheckpointError(
        f"a checkpoint must hold {path.name}, but {path} is missing. Use another checkpoint."
    )
