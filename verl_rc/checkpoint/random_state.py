"""The states of a process's random generators, one file per rank."""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from verl_rc.checkpoint.store import CheckpointError


def get_random_state() -> dict[str, Tensor]:
    """The states of torch's CPU generator and, where there is one, of this process's CUDA device."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def save_random_state(state: dict[str, Tensor], path: Path) -> None:
    """Write what ``get_random_state`` gave."""
    torch.save(state, path)


def read_random_state(path: Path) -> dict[str, Tensor]:
    """What was saved by the rank of this number; empty when there was none. Raises ``CheckpointError`` for a broken file."""
    if not path.exists():
        return {}
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, EOFError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} must hold random states, but reading it gave: {reason}. Use another one.") from error


def set_random_state(state: dict[str, Tensor]) -> None:
    """Continue the generators that ``state`` names and this machine has."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
