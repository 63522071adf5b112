"""Checkpoints of a run: complete ones only, which any number of ranks can resume exactly."""

from verl_rc.runtime.checkpoint.run_state import RunState, SavedRun, SupplyState, check_settings, state_under
from verl_rc.runtime.checkpoint.shard_folder import load_full_state_dict, shards_problem
from verl_rc.runtime.checkpoint.shards import (
    BackgroundWriter,
    collect_shards,
    get_random_state,
    load_shards,
    named_tensors,
    resume_schedule,
    schedule_state,
    set_random_state,
    write_shards,
)
from verl_rc.runtime.checkpoint.store import CheckpointError, CheckpointStore, ResumeMode

__all__ = [
    "BackgroundWriter",
    "CheckpointError",
    "CheckpointStore",
    "ResumeMode",
    "RunState",
    "SavedRun",
    "SupplyState",
    "check_settings",
    "collect_shards",
    "get_random_state",
    "load_full_state_dict",
    "load_shards",
    "named_tensors",
    "resume_schedule",
    "schedule_state",
    "set_random_state",
    "shards_problem",
    "state_under",
    "write_shards",
]
