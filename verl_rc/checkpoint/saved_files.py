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
        raise _missing(path) from None
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
        raise _missing(path) from None
    except Exception as error:  # a broken pickle can raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(
            f"{path} must hold {contents}, but reading it gave {reason}. Use another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} must hold {contents}, got {type(state).__name__}. Use another checkpoint."
        )
    return state


def _missing(path: Path) -> CheckpointError:
    return CheckpointError(
        f"a checkpoint must hold {path.name}, but {path} is missing. Use another checkpoint."
    )
