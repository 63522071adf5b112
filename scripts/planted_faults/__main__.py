"""Plant faults in short real runs and ask the doctor: python -m scripts.planted_faults [WORD …] [--seeds 1,2]
[--judge]

Run folders are kept below --folder, so an interrupted matrix goes on, and a changed rule is judged without a
run. Results are a file below runs/planted_faults and the table printed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_faults.matrix import lines_of, row_of, write_matrix
from planted_faults.runs import TABLES, known_run, run_all, start_trainer

from verl_rc.insight.run_folder import DIAGNOSIS
from verl_rc.study.runs import ROOT, prepare

LOG = ROOT / "runs" / "planted_faults"
RESULTS = {
    "faults": LOG / "2026-11-22-planted-faults.json",
    "held-out": LOG / "2026-11-22-held-out-faults.json",
    "held-out-second": LOG / "2026-11-23-held-out-faults-second.json",
    "held-out-fourth": LOG / "2026-11-25-held-out-faults-fourth.json",
    "healthy": LOG / "2026-11-23-healthy-for-long.json",
}


def main() -> int:
    """Run what is missing, judge the runs that are there, and put them into the matrix."""
    parser = argparse.ArgumentParser(prog="python -m scripts.planted_faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="words that an arm's name must have, such as: top-p")
    parser.add_argument(
        "--seeds", default="1", help="seeds, such as 1,2,3; thresholds come from seed 1 alone"
    )
    parser.add_argument("--judge", action="store_true", help="run nothing")
    parser.add_argument(
        "--table", choices=TABLES, default="faults", help="which arms; healthy: 1,000 steps each"
    )
    parser.add_argument(
        "--replay", metavar="R0,R1", default="", help="also replay these in every run that has no replays yet"
    )
    folder = ROOT / "runs" / "planted_faults"
    parser.add_argument("--folder", type=Path, default=folder, help="where models, data and runs are kept")
    options = parser.parse_args()
    table = TABLES[options.table]
    arms = [arm for arm in table if set(options.words) <= set(arm.split())]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if not options.judge:
        prepare(options.folder)
        for run in run_all(options.folder, arms, seeds, start_trainer):
            print(f"{run.arm}, seed {run.seed}: exit {run.exit_status}, {run.seconds:.0f} s", flush=True)
    runs = [
        run for seed in seeds for arm in arms if (run := known_run(options.folder, arm, seed)) is not None
    ]
    for run in runs if options.replay else ():
        if not (run.folder / DIAGNOSIS).is_file():
            replay(run.folder, options.replay.split(","))
    print("\n".join(lines_of(write_matrix(RESULTS[options.table], table, [row_of(run) for run in runs]))))
    return 0


def replay(folder: Path, names: list[str]) -> None:
    """Replay what a run recorded; says why where it cannot be done."""
    from verl_rc.insight.diagnosis import DiagnosisRequest
    from verl_rc.insight.replay.diagnosis import diagnose_with_replays

    try:
        seconds = diagnose_with_replays(DiagnosisRequest(folder, names)).seconds
        print(f"{folder.name}: replayed in {sum(seconds.values()):.0f} s", flush=True)
    except ValueError as error:
        print(f"{folder.name}: not replayed: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
