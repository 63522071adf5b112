"""The driver's part of a checkpoint, and the settings that a resumed run must not change."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter

from verl_rc import __version__
from verl_rc.algorithm.health.ranges import HealthHistory
from verl_rc.algorithm.health.run_limits import FailedGroups, LeftOutUpdates, RewardHistory
from verl_rc.algorithm.ppo.control import ControlState
from verl_rc.algorithm.supply.group_book import BookState
from verl_rc.algorithm.supply.step_time import WaitTotals
from verl_rc.config.schema import value_at
from verl_rc.runtime.checkpoint.checksums import FileSum, require_whole, write_checksums
from verl_rc.runtime.checkpoint.saved_files import fields_in_one_line, read_json, read_tensors
from verl_rc.runtime.checkpoint.store import CheckpointError


@dataclass(frozen=True)
class SupplyState:
    """The supply after a step. A group that has not ended is sampled on when the run resumes."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    book: BookState
    failed: FailedGroups = field(default_factory=FailedGroups)
    drawn: tuple[tuple[int, int], ...] = ()
    """Epoch and row index of the prompts that were drawn and not admitted yet."""
    groups: Callable[[], dict[str, Any]] = dict
    """Packs the open groups (``verl_rc.records.groups.pack``), which only a checkpoint needs: a separate file
    holds them."""
    filtered_since_batch: int = 0
    """Groups that were filtered since the last batch was complete, for ``filter_groups.max_num_gen_batches``.
    """
    waits: WaitTotals = field(default_factory=WaitTotals)
    """Seconds for the advice at the end of the run."""
    is_length_alert_sent: bool = False
    """Whether an alert said that lengths trained on are not those sampled; it is sent once in a run."""

    @property
    def num_groups(self) -> int:
        """Open groups."""
        return len(self.groups().get("groups", ()))


FORMAT_VERSION = 9
"""Format of the run state, increased when its fields or their meaning change; no other format is read."""
RUN_STATE_FILE = "run_state.json"
LOADER_FILE = "data.pt"
GROUPS_FILE = "groups.pt"
"""The groups of ``RunState.supply``."""

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
    "actor_rollout_ref.ref.sync_freq",
)
"""Settings that decide which prompts and samples come next, or what the saved models mean.

Everything else may change when a run is resumed: learning rates, losses, corrections, lengths, ranks,
engines, loggers, and paths (models and data may move; the prompt stream itself refuses other prompts).
"""

_DISTRIBUTION = tuple(
    f"actor_rollout_ref.rollout.{name}" for name in ("temperature", "top_p", "top_k", "min_p")
)
"""Settings that the log-probs of sampled tokens depend on."""

OPEN_GROUP_KEYS = (
    *_DISTRIBUTION,
    "actor_rollout_ref.rollout.enable_rollout_routing_replay",
    "algorithm.rollout_correction.score_centering.enabled",
    "actor_rollout_ref.rollout.multi_turn.enable",
    "actor_rollout_ref.rollout.multi_turn.tools",
    "actor_rollout_ref.rollout.multi_turn.format",
    "actor_rollout_ref.rollout.environment.name",
    "actor_rollout_ref.rollout.environment.arguments",
    "actor_rollout_ref.rollout.environment.choices",
    "actor_rollout_ref.rollout.environment.reward",
    "actor_rollout_ref.exact",
)
"""Settings that decide what the tokens, episodes and log-probs of groups mean that were sampled ahead; they
may change once no such group is open."""

_MEASURED_UNDER: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("rollout_gap_limit", "canary_gap_limit", "health"): (
        *_DISTRIBUTION,
        "actor_rollout_ref.rollout.dtype",
        "actor_rollout_ref.rollout.quantization",
        "actor_rollout_ref.rollout.kv_cache_dtype",
        "actor_rollout_ref.actor.fsdp_config.dtype",
        "actor_rollout_ref.model.head_dtype",
        "actor_rollout_ref.exact",
        "trainer.device",
    ),
    ("rewards",): (
        "reward.custom_reward_function",
        "reward.reward_model",
        "reward.reward_kwargs",
        "reward.failure_score",
        "actor_rollout_ref.rollout.environment",
    ),
    ("control.kl_coef",): ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"),
    ("control.entropy_coeff",): ("algorithm.adaptive_entropy",),
    ("control.rejection_threshold",): (
        "algorithm.rollout_correction.rollout_rs",
        "algorithm.rollout_correction.rollout_rs_threshold",
    ),
}
"""Fields of ``RunState`` that begin anew when a resumed run changes one of the settings that they were
measured or adapted under."""


@dataclass(frozen=True)
class RunState:
    """The state of the driver after a step; the ranks save models and optimizers.

    A checkpoint stores exactly this record, and a resumed run starts with it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int = 0
    """Training steps done."""
    prompts: dict[str, Any] = field(default_factory=dict)
    """``state_dict`` of the prompt stream: its position in the data."""
    supply: SupplyState | None = None
    """Groups in flight or waiting, and what became of the others. None means before the first step."""
    control: ControlState = field(default_factory=ControlState)
    """Adaptive weights of KL penalty and entropy bonus, and adaptive rejection threshold."""
    rollout_gap_limit: float | None = None
    """Limit of the mean gap of a step's rollouts, nats. None means not calibrated yet."""
    canary_gap_limit: float | None = None
    """Limit of the mean gap of canary tokens, nats."""
    left_out: LeftOutUpdates = field(default_factory=LeftOutUpdates)
    """Updates that were left out in a row."""
    rewards: RewardHistory = field(default_factory=RewardHistory)
    """Mean scores of the last steps, and the best mean so far."""
    health: HealthHistory = field(default_factory=HealthHistory)
    """Metrics outside their healthy range, and when a warning was logged."""
    tracker_run_id: str | None = None
    """Run id of the experiment tracker; None without one."""


_STATE = TypeAdapter(RunState)


@dataclass(frozen=True)
class SavedRun:
    """The driver's part of a checkpoint: the state after a step, the configuration, and the version that
    wrote it."""

    state: RunState
    config: dict[str, Any]
    """The resolved configuration as a plain tree."""
    num_ranks: int
    """Number of trainer ranks that saved; any number may load."""

    def save(self, folder: Path) -> None:
        """Write ``run_state.json``, ``data.pt`` and, if groups are in flight or waiting, ``groups.pt`` into
        ``folder``, and their checksums.

        Raises ``ValueError`` for values that JSON cannot hold, ``CheckpointError`` or ``OSError`` when
        writing fails.
        """
        state = asdict(self.state)
        tensors = {LOADER_FILE: state.pop("prompts")}
        if state["supply"] is not None:
            tensors[GROUPS_FILE] = state["supply"].pop("groups")()
        for name, value in tensors.items():
            try:
                torch.save(value, folder / name)
            except RuntimeError as error:  # that is how torch reports a full disk
                raise CheckpointError(
                    f"writing {folder / name} failed: {str(error).partition(chr(10))[0]}."
                ) from error
        plain = {
            "format_version": FORMAT_VERSION,
            "written_by": f"verl_rc {__version__}",
            "num_ranks": self.num_ranks,
            "state": state,
            "config": self.config,
        }
        (folder / RUN_STATE_FILE).write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n")
        write_checksums(folder, {name: FileSum.of(folder / name) for name in (RUN_STATE_FILE, *tensors)})

    @classmethod
    def load(cls, folder: Path) -> "SavedRun":
        """Read what ``save`` wrote.

        Raises ``CheckpointError`` for a missing folder, a missing or changed file, and one of another format.
        """
        if not folder.is_dir():
            raise CheckpointError(
                f"a checkpoint must be a folder, but there is none at {folder}. Name one that exists."
            )
        path = folder / RUN_STATE_FILE
        plain = read_json(path)
        version = plain.pop("format_version", None)
        if version != FORMAT_VERSION:
            writer = plain.get("written_by", "an unknown release")
            raise CheckpointError(
                f"{path} must have format {FORMAT_VERSION} for verl_rc {__version__}, got format {version} "
                f"of {writer}. Resume with the release that wrote it, or start anew with "
                "trainer.resume_mode=disable."
            )
        expected = {"state", "config", "num_ranks", "written_by"}
        if plain.keys() != expected or not isinstance(plain["state"], dict):
            raise CheckpointError(
                f"{path} must hold {sorted(expected)}; missing: {sorted(expected - plain.keys())}, unknown: "
                f"{sorted(plain.keys() - expected)}. Use another checkpoint."
            )
        try:
            missing = {member.name for member in fields(RunState)} - plain["state"].keys() - {"prompts"}
            if missing:
                raise ValueError(f"missing: {sorted(missing)}")
            state = _STATE.validate_python(plain["state"])
        except ValueError as error:
            raise CheckpointError(
                f"{path} must hold the state of a run, but: {fields_in_one_line(error)}. Use another "
                "checkpoint."
            ) from error
        require_whole(folder)
        state = replace(state, prompts=read_tensors(folder / LOADER_FILE, "a loader's state"))
        if state.supply is not None:
            groups = read_tensors(folder / GROUPS_FILE, "groups in flight")
            state = replace(state, supply=replace(state.supply, groups=lambda: groups))
        return cls(state, plain["config"], plain["num_ranks"])


def check_settings(saved: SavedRun, config: Mapping[str, Any]) -> None:
    """Refuse to resume with settings under which the saved state means something else.

    ``config``: resolved, as a plain tree; keys that it or the saved one lacks are not compared. Raises
    ``CheckpointError`` naming every key of ``FIXED_KEYS`` that differs, or of ``OPEN_GROUP_KEYS`` when groups
    are open.
    """
    if differences := _differences(saved.config, config, FIXED_KEYS):
        raise CheckpointError(
            "a resumed run must keep the settings that its checkpoint was trained with: "
            f"{'; '.join(differences)}. Restore them, or start anew with trainer.resume_mode=disable."
        )
    supply = saved.state.supply
    if supply is None or not supply.num_groups:
        return
    if differences := _differences(saved.config, config, OPEN_GROUP_KEYS):
        raise CheckpointError(
            f"the checkpoint holds {supply.num_groups} groups that were sampled ahead under other settings: "
            f"{'; '.join(differences)}. Restore them, or start anew with trainer.resume_mode=disable."
        )


def state_under(saved: SavedRun, config: Mapping[str, Any]) -> tuple[RunState, list[str]]:
    """The saved state for a run with this ``config``, and a sentence for each change that makes a part of it
    begin anew (``_MEASURED_UNDER``)."""
    state, messages = saved.state, []
    for names, keys in _MEASURED_UNDER.items():
        differences = _differences(saved.config, config, keys)
        anew = {name: _begun_anew(state, name) for name in names} if differences else {}
        forgotten = [name for name, other in anew.items() if other != state]
        for name in forgotten:
            state = _begun_anew(state, name)
        if forgotten:
            messages.append(f"{', '.join(forgotten)} as in a new run, because {'; '.join(differences)}")
    return state, messages


def _begun_anew(state: RunState, name: str) -> RunState:
    """The state with the field ``name`` as in a new run."""
    outer, _, inner = name.partition(".")
    initial = getattr(RunState(), outer)
    if inner:
        initial = replace(getattr(state, outer), **{inner: getattr(initial, inner)})
    return replace(state, **{outer: initial})


_ABSENT = object()


def _differences(saved: Mapping[str, Any], config: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Sentences about the ``keys`` whose values differ; a key that one of the trees lacks is skipped."""
    pairs = [(key, value_at(saved, key, _ABSENT), value_at(config, key, _ABSENT)) for key in keys]
    return [words for pair in pairs if _ABSENT not in pair for words in _in_words(*pair)]


def _in_words(key: str, before: Any, now: Any) -> Iterator[str]:
    """The differences below a key, in words."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before.keys() == now.keys():
        for name in before:
            yield from _in_words(f"{key}.{name}", before[name], now[name])
    elif before != now:
        yield f"{key} was {before!r}, now it is {now!r}"
