"""Running arms one after the other; what ended a run stands in its folder, which is kept for the doctor."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planted_faults.faults import ARMS, COMMON, HEALTHY_FOR_LONG, Fault
from planted_faults.held_out import HELD_OUT, RIGHT, as_faults
from planted_faults.held_out_fourth import fourth_set
from planted_faults.held_out_second import HELD_OUT_2, RIGHT_2

from verl_rc.study.runs import INTERRUPTED, folder_of, run_in

DONE = "planted.json"
"""In the folder of a run that has ended: exit status, seconds, overrides."""
Start = Callable[[str, Sequence[str], Path], int]
"""Runs the trainer with a fault and overrides, its output in a file, and returns its exit status."""
TABLES: Mapping[str, Mapping[str, Fault]] = {
    "faults": ARMS,
    "held-out": as_faults(HELD_OUT, RIGHT, 101),
    "held-out-second": as_faults(HELD_OUT_2, RIGHT_2, 201),
    "held-out-fourth": fourth_set(),
    "healthy": HEALTHY_FOR_LONG,
}
PLANS: Mapping[str, Fault] = {arm: fault for table in TABLES.values() for arm, fault in table.items()}
"""Every arm of every table."""


@dataclass(frozen=True)
class PlantedRun:
    """An arm with one seed that was run."""

    arm: str
    seed: int
    folder: Path
    exit_status: int
    seconds: float


def overrides_of(arm: str, seed: int) -> list[str]:
    """All that decides the numbers of a run."""
    return [*COMMON, *PLANS[arm].overrides, f"trainer.seed={seed}"]


def known_run(base: Path, arm: str, seed: int) -> PlantedRun | None:
    """The run of an arm with a seed, if it was run with the overrides of today; None: it is still to be
    run."""
    folder = folder_of(base, arm, seed)
    try:
        done = json.loads((folder / DONE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_same = done["overrides"] == overrides_of(arm, seed) and done["planted"] == PLANS[arm].planted
    return PlantedRun(arm, seed, folder, done["exit_status"], done["seconds"]) if is_same else None


def run_all(base: Path, arms: Sequence[str], seeds: Sequence[int], start: Start) -> Iterator[PlantedRun]:
    """Run what is still to be run: all arms of a seed before the next seed. Models and data lie in ``base``
    too."""
    for seed in seeds:
        for arm in arms:
            if known_run(base, arm, seed) is not None:
                continue
            folder = folder_of(base, arm, seed)
            overrides = overrides_of(arm, seed)
            places = (
                *(
                    f"actor_rollout_ref.model.path={base / 'sft_model'}",
                    f"trainer.default_local_dir={folder}",
                ),
                *(f"data.{split}_files={base / 'data' / split}.parquet" for split in ("train", "val")),
            )
            began = time.time()
            status = start(PLANS[arm].planted, [*overrides, *places], folder)
            if status in INTERRUPTED:
                raise KeyboardInterrupt
            if not (folder / "metrics.jsonl").is_file():
                continue  # it did not start, which says nothing of the fault: it is still to be run
            seconds = round(time.time() - began, 1)
            done = {
                "exit_status": status,
                "seconds": seconds,
                "overrides": overrides,
                "planted": PLANS[arm].planted,
            }
            (folder / DONE).write_text(json.dumps(done) + "\n", encoding="utf-8")
            yield PlantedRun(arm, seed, folder, status, seconds)


def start_trainer(fault: str, overrides: Sequence[str], folder: Path) -> int:
    """Run the trainer in a process of its own."""
    return run_in(folder, "scripts.planted_faults.start", fault, "--", *overrides)
