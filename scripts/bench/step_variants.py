"""Step times of the quickstart under several settings, as ratios to the first setting.

Usage: python scripts/bench/step_variants.py NAME=OVERRIDE[,OVERRIDE...] ...      (needs the quickstart's
model and data) For example:  packed= padded=actor_rollout_ref.model.use_remove_padding=False Settings take
turns, round after round, each in fresh processes; steps of all rounds are pooled and medians are printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("gen", "old_log_prob", "update_actor", "update_weights", "step")
WARM_UP_STEPS = 2


def run_steps(overrides: list[str], steps: int, folder: Path) -> list[dict[str, float]]:
    """Metrics of every step after the warm-up; ends the script with the log's end when the run fails."""
    command = [
        "bash",
        "recipes/quickstart_digits_cpu.sh",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=-1",
    ]
    command += ["trainer.val_before_train=False", "trainer.logger=[console]", *overrides]
    python = str(ROOT / ".venv" / "bin" / "python")
    environment = {**os.environ, "RUN_DIR": str(folder), "PYTHON": python, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"the run failed:\n{result.stdout[-1000:]}\n{result.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > WARM_UP_STEPS]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="+", help="NAME=OVERRIDE,OVERRIDE")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    pairs = [setting.partition("=") for setting in arguments.settings]
    settings = {name: [override for override in rest.split(",") if override] for name, _, rest in pairs}
    measured: dict[str, list[dict[str, float]]] = defaultdict(list)
    for round_number in range(arguments.rounds):
        for name, overrides in settings.items():
            with tempfile.TemporaryDirectory() as folder:
                measured[name] += run_steps(overrides, arguments.steps, Path(folder))
            print(f"round {round_number + 1}: {name} done", flush=True)
    medians = {
        name: {
            stage: statistics.median(line.get(f"timing_s/{stage}", 0.0) for line in lines) for stage in STAGES
        }
        for name, lines in measured.items()
    }
    first = next(iter(settings))
    print(f"| setting | {' | '.join(STAGES)} | step / {first} |\n|{'---|' * (len(STAGES) + 2)}")
    for name, seconds in medians.items():
        cells = " | ".join(f"{seconds[stage]:.3f}" for stage in STAGES)
        print(
            f"| {name} ({len(measured[name])} steps) | {cells} | "
            f"{seconds['step'] / medians[first]['step']:.2f} |"
        )


if __name__ == "__main__":
    main()
