"""What the driver must know to go on where a run stopped, and which settings must not change on the way."""

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from verl_rc import __version__
from verl_rc.checkpoint.store import CheckpointError
from verl_rc.metrics.health import HealthHistory
from verl_rc.ppo.control import ControlState
from verl_rc.ppo.guards import RewardHistory

FORMAT_VERSION = 2
"""Of the run state; a change of its fields or of their meaning raises it. Format 1 is read too."""
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


@dataclass
class RunState:
    """What changes from step to step in the driver; models and optimizers are saved by the ranks that hold them.

    A checkpoint stores exactly this, and a resumed run starts with what was stored. Fields are plain values: to move one is
    to put another value in its place.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int = 0
    """Training steps done."""
    prompts: dict[str, Any] = field(default_factory=dict)
    """``state_dict`` of the prompt stream: where the next batch comes from."""
    control: ControlState = field(default_factory=ControlState)
    """Weight of the KL penalty and rejection threshold, as far as the run moves them."""
    rollout_gap_limit: float | None = None
    """Largest mean gap that the rollouts of a step may have, nats; None: not calibrated yet."""
    canary_gap_limit: float | None = None
    """The same for canary tokens."""
    skipped_updates: int = 0
    """Optimizer steps in a row that were skipped because rejection left nothing, so far."""
    nonfinite_actor_updates: int = 0
    """Optimizer steps of the actor in a row that were left out because their gradient was not finite, so far."""
    nonfinite_critic_updates: int = 0
    """The same for the critic."""
    rewards: RewardHistory = field(default_factory=RewardHistory)
    """Scores of the last steps, and the best mean so far."""
    health: HealthHistory = field(default_factory=HealthHistory)
    """Metrics that are outside their healthy range, and when that was said."""
    tracker_run_id: str | None = None
    """The experiment tracker's run, to be continued; None: there is none."""


_STATE = TypeAdapter(RunState)


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint's part of the driver: the state after a step, and what wrote it."""

    state: RunState
    config: dict[str, Any]
    """The resolved configuration as a plain tree."""
    num_ranks: int
    """Trainer ranks that saved; any number may load."""

    def save(self, folder: Path) -> None:
        """Write ``run_state.json`` and ``data.pt`` into ``folder``. Raises ``ValueError`` for what JSON cannot hold,
        ``CheckpointError`` or ``OSError`` when the disk does not take it."""
        state = asdict(self.state)
        try:
            torch.save(state.pop("prompts"), folder / LOADER_FILE)
        except RuntimeError as error:  # that is how torch reports a full disk
            raise CheckpointError(f"writing {folder / LOADER_FILE} failed: {str(error).partition(chr(10))[0]}.") from error
        plain = {
            "format_version": FORMAT_VERSION,
            "written_by": f"verl_rc {__version__}",
            "num_ranks": self.num_ranks,
            "state": state,
            "config": self.config,
        }
        (folder / RUN_STATE_FILE).write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "SavedRun":
        """What ``save`` wrote, in this or an earlier format. Raises ``CheckpointError`` for a folder or file that is missing,
        broken or too new."""
        if not folder.is_dir():
            raise CheckpointError(f"a checkpoint must be a folder, but there is none at {folder}. Name one that exists.")
        path = folder / RUN_STATE_FILE
        plain = _read_json(path)
        version = plain.pop("format_version", None)
        if version not in (1, FORMAT_VERSION):
            writer = plain.get("written_by", "an unknown release")
            raise CheckpointError(
                f"{path} must have format 1 to {FORMAT_VERSION} for verl_rc {__version__}, but {writer} wrote it in format "
                f"{version}. Resume with {writer}, or start anew with trainer.resume_mode=disable."
            )
        if version == 1:
            plain = _from_format_1(plain)
        expected = {"state", "config", "num_ranks", "written_by"}
        if plain.keys() != expected or not isinstance(plain["state"], dict):
            raise CheckpointError(
                f"{path} must hold {sorted(expected)}; missing: {sorted(expected - plain.keys())}, unknown: "
                f"{sorted(plain.keys() - expected)}. Use another checkpoint."
            )
        try:
            missing = {one.name for one in fields(RunState)} - plain["state"].keys() - {"prompts"}
            if missing:
                raise ValueError(f"missing: {sorted(missing)}")
            state = _STATE.validate_python(plain["state"])
        except ValueError as error:
            raise CheckpointError(
                f"{path} must hold the state of a run, but: {_in_one_line(error)}. Use another checkpoint."
            ) from error
        state.prompts = _read_loader_state(folder / LOADER_FILE)
        return cls(state, plain["config"], plain["num_ranks"])


def _from_format_1(plain: dict[str, Any]) -> dict[str, Any]:
    """What verl_rc 0.1 wrote before the state was one record; guards that it did not save start at zero."""
    names = {"step", "control", "gap_limits", "skipped_in_a_row", "tracker_run_id", "num_ranks", "config"}
    since = {"nonfinite_in_a_row", "reward_watch"}
    if not names <= plain.keys() <= names | since:
        raise CheckpointError(
            f"a {RUN_STATE_FILE} of format 1 must hold {sorted(names)}; missing: {sorted(names - plain.keys())}, unknown: "
            f"{sorted(plain.keys() - names - since)}. Use another checkpoint."
        )
    nonfinite = plain.get("nonfinite_in_a_row", {})
    state = {
        "step": plain["step"],
        "control": {"kl_coef": plain["control"]["kl_coef"], "rejection_threshold": plain["control"]["threshold"]},
        "rollout_gap_limit": plain["gap_limits"].get("rollouts"),
        "canary_gap_limit": plain["gap_limits"].get("canary"),
        "skipped_updates": plain["skipped_in_a_row"],
        "nonfinite_actor_updates": nonfinite.get("actor", 0),
        "nonfinite_critic_updates": nonfinite.get("critic", 0),
        "rewards": plain.get("reward_watch", {}),
        "health": {},
        "tracker_run_id": plain["tracker_run_id"],
    }
    return {"state": state, "config": plain["config"], "num_ranks": plain["num_ranks"], "written_by": "verl_rc 0.1.0"}


def _in_one_line(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {one['input']!r}" for one in error.errors())


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
