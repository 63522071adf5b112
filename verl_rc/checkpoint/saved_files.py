"""Files of a checkpoint, read with one error for all that can be wrong with them."""

import json
from pathlib import Path
from typing import Any

import torch

from verl_rc.checkpoint.store import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ``CheckpointError`` when it is missing or broken."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, ValueError) as error:
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
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise missing(path) from None
    except Exception as error:  # a broken pickle can raise anything
        raise CheckpointError(
            f"{path} must hold {contents}, but reading it gave {in_one_line(error)}. Use another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} must hold {contents}, got {type(state).__name__}. Use another checkpoint."
        )
    return state


def in_one_line(error: BaseException) -> str:
    """Type and first line of an error, without torch's advice to load what it refuses."""
    said = str(error).partition("\n")[0]
    if "weights_only" in said:
        said = "it holds something else than tensors, or is damaged"
    return f"{type(error).__name__}: {said}"


def missing(path: Path) -> CheckpointError:
    """The error for a file that is not there."""
    return CheckpointError(
        f"a checkpoint must hold {path.name}, but {path} is missing. Use another checkpoint."
    )
