"""What the driver must know to go on where a run stopped, and which settings must not change on the way."""

import json
import pickle
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from verl_rc.checkpoint.errors import CheckpointError

FORMAT_VERSION = 1
"""Of the run state; a change of its fields or of their meaning raises it."""
RUN_STATE_FILE = "run_state.json"
LOADER_FILE = "data.pt"

FIXED_KEYS = (
    "data.train_batch_size",
    "data.gen_batch_size",
    "data.shuffle",
    "data.seed",
    "data.train_max_samples",
    "trainer.seed",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.model.target_modules",
)
"""Settings that decide which prompts and samples come next, or what the saved adapters mean.

Everything else may change when a run is resumed: learning rates, losses, corrections, lengths, ranks, engines, loggers,
and paths (models and data may move; the loader itself refuses data of another length).
"""


@dataclass(frozen=True)
class RunState:
    """The driver's own state after ``step`` steps; models and optimizers are saved by the ranks that hold them."""

    step: int
    """Training steps done."""
    loader: dict[str, Any]
    """``state_dict`` of the prompt loader: where the next batch comes from."""
    control: dict[str, float | None]
    """What the run had moved: weight of the KL penalty, rejection threshold; None: there is none."""
    gap_limits: dict[str, float | None]
    """Calibrated limits of the weight-sync proofs by monitor; None: not calibrated yet."""
    skipped_in_a_row: int
    """Steps in a row whose updates were all skipped, so far."""
    tracker_run_id: str | None
    """The experiment tracker's run, to be continued."""
    num_ranks: int
    """Trainer ranks that saved; any number may load."""
    config: dict[str, Any]
    """The resolved configuration as a plain tree."""
    nonfinite_in_a_row: dict[str, int] = field(default_factory=dict)
    """Optimizer steps in a row that were left out because of their gradient, so far, by role."""
    reward_watch: dict[str, Any] = field(default_factory=lambda: {"recent": [], "best": None})
    """Scores of the last steps, and the best mean so far."""
    format_version: int = FORMAT_VERSION
    """``FORMAT_VERSION`` when it was saved."""

    def save(self, folder: Path) -> None:
        """Write ``run_state.json`` and ``data.pt`` into ``folder``. Raises ``ValueError`` for what JSON cannot hold,
        ``CheckpointError`` or ``OSError`` when the disk does not take it."""
        plain = asdict(self)
        try:
            torch.save(plain.pop("loader"), folder / LOADER_FILE)
        except RuntimeError as error:  # that is how torch reports a full disk
            raise CheckpointError(f"writing {folder / LOADER_FILE} failed: {str(error).partition(chr(10))[0]}.") from error
        (folder / RUN_STATE_FILE).write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "RunState":
        """What ``save`` wrote. Raises ``CheckpointError`` for a folder or file that is missing, broken or too new."""
        if not folder.is_dir():
            raise CheckpointError(f"a checkpoint must be a folder, but there is none at {folder}. Name one that exists.")
        plain = _read_json(folder / RUN_STATE_FILE)
        version = plain.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder / RUN_STATE_FILE} must have format version {FORMAT_VERSION}, got {version}. Resume with the "
                "release of verl_rc that wrote it, or start anew with trainer.resume_mode=disable."
            )
        names = {one.name for one in fields(cls)} - {"loader"}
        needed = {one.name for one in fields(cls) if one.default is one.default_factory is MISSING} - {"loader"}
        if not needed <= plain.keys() <= names:
            raise CheckpointError(
                f"{folder / RUN_STATE_FILE} must hold {sorted(names)}; missing: {sorted(needed - plain.keys())}, unknown: "
                f"{sorted(plain.keys() - names)}. Use another checkpoint."
            )
        return cls(loader=_read_loader_state(folder / LOADER_FILE), **plain)


def check_same_model(saved_config: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse to go on with settings that would make another model or training of it.

    Both are resolved configurations as plain trees; keys that either does not have are not compared. Raises
    ``CheckpointError`` naming every key of ``FIXED_KEYS`` that differs.
    """
    differences = []
    for key in FIXED_KEYS:
        saved, given = _value_at(saved_config, key), _value_at(config, key)
        if saved is not _ABSENT and given is not _ABSENT and saved != given:
            differences.append(f"{key} was {saved!r}, now it is {given!r}")
    if differences:
        raise CheckpointError(
            f"a resumed run must keep the settings that its checkpoint was trained with: {'; '.join(differences)}. Restore "
            "them, or start anew with trainer.resume_mode=disable."
        )


_ABSENT = object()


def _value_at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"a checkpoint must hold {path.name}, but {path} is missing. Use another checkpoint.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} must be a JSON file, but reading it gave: {error}. Use another checkpoint.") from error
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(plain).__name__}. Use another checkpoint.")
    return plain


def _read_loader_state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"a checkpoint must hold {path.name}, but {path} is missing. Use another checkpoint.") from None
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} must hold a loader's state, but reading it gave: {reason}. Use another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} must hold a loader's state, got {type(state).__name__}. Use another checkpoint.")
    return state
