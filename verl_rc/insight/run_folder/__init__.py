"""Reading a run: its folder, or the log of another trainer, into ``RunData``."""

from verl_rc.insight.run_folder.folder import DIAGNOSIS, read_replays, read_run
from verl_rc.insight.run_folder.records import (
    Alert,
    HeatMap,
    NothingToReadError,
    ReplayedRecord,
    RunData,
    SavedSample,
    Series,
)

__all__ = [
    "DIAGNOSIS",
    "Alert",
    "HeatMap",
    "NothingToReadError",
    "ReplayedRecord",
    "RunData",
    "SavedSample",
    "Series",
    "read_replays",
    "read_run",
]
