"""What asynchronous training gains on this machine: steps of real runs, sides measured in the same run.

Usage: python scripts/bench/asynchronous.py ratios|tools --model FOLDER --data FOLDER [--steps N] [--folder DIR]

``ratios``: the quickstart one step off, with sampling about 0.5, 1 and 2 times as long as training. A step should take the longer
of both sides and the publication. ``tools``: sums with a calculator that sleeps (model and data of recipes/digits_cpu_tools.sh),
in turns and 1 and 3 steps off, and with whole responses.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from verl_rc.report.timeline import read_timeline

ROOT = Path(__file__).parents[2]
WAITING = {"gen", "step", "admit"}
PUBLISHING = {"update_weights", "sync_canary"}
SLEEPING_TOOL = '''
import random
import time

from verl_rc.rollout.tools import Tool, evaluate_expression


def calculate(expression: str) -> str:
    time.sleep(min(4.0, random.Random(expression).lognormvariate(-1.24, 0.8)))  # 0.4 s in the mean
    return evaluate_expression(expression)


CALCULATOR = Tool("calculator", "Evaluates an expression.", {"expression": "What to evaluate."}, calculate)
'''
ONE_OFF = ["async=one_step_off"]
WHOLE = [*ONE_OFF, "async_training.staleness_threshold=2"]
ARMS = {
    "ratios": {
        "0.5": [*ONE_OFF, "actor_rollout_ref.actor.ppo_epochs=2"],
        "1": ONE_OFF,
        "2": [*ONE_OFF, "actor_rollout_ref.rollout.max_num_seqs=48"],
    },
    "tools": {
        "in turns": [],
        "1 step off": ["async=partial"],
        "3 steps off": ["async=partial", "async_training.staleness_threshold=3"],
        "whole 2 steps off": WHOLE,
        "whole 2 steps off loaded beside": [
            *WHOLE,
            "actor_rollout_ref.rollout.checkpoint_engine.stage_updates=True",
        ],
    },
}
OF_TOOLS = [
    "actor_rollout_ref.rollout.multi_turn.tools=[sleeping_tool:CALCULATOR]",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]


def run(name: str, overrides: list[str], given: argparse.Namespace) -> dict[str, float]:
    """Medians over the steps of a run, without the first four and the last, which are not like the others."""
    folder = given.folder / name.replace(" ", "_")
    recipe = "digits_cpu_tools.sh" if given.case == "tools" else "quickstart_digits_cpu.sh"
    settings = {"PYTHON": sys.executable, "MODEL_PATH": str(given.model), "DATA_DIR": str(given.data), "RUN_DIR": str(folder)}
    settings |= {"CORRECTION": "decoupled_token_is", "PYTHONPATH": os.pathsep.join([str(ROOT), str(given.folder)])}
    short = [f"trainer.total_training_steps={given.steps}", "trainer.val_before_train=False", "trainer.test_freq=-1"]
    short += ["trainer.save_freq=-1", "trainer.logger=[console]", "async_training.trace=True"]
    command = ["bash", str(ROOT / "recipes" / recipe), *(OF_TOOLS if given.case == "tools" else []), *short, *overrides]
    with (given.folder / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, stdout=log, stderr=log, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if 4 < line["step"] < given.steps]
    timeline = read_timeline(folder)

    def sampled(step: int) -> float:
        return sum(span.seconds for span in timeline.between(step, step).spans if span.what == "decode")

    def stages(line: dict[str, float], chosen: bool, names: set[str]) -> float:
        timed = {name.removeprefix("timing_s/"): value for name, value in line.items() if name.startswith("timing_s/")}
        return sum(value for name, value in timed.items() if (name in names) is chosen)

    median = statistics.median
    found = {
        "step": median(line["timing_s/step"] for line in steps),
        "sampling": median(sampled(line["step"]) for line in steps),
        "training": median(stages(line, False, WAITING | PUBLISHING) for line in steps),
        "publishing": median(stages(line, True, PUBLISHING) for line in steps),
        "waiting": median(line.get("timing_s/gen", 0.0) for line in steps),
    }
    return found | {"bound": max(found["sampling"], found["training"]) + found["publishing"]}


def main() -> None:
    """Run the arms one after the other and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=ARMS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_asynchronous"))
    given = parser.parse_args()
    given.folder, given.model, given.data = given.folder.resolve(), given.model.resolve(), given.data.resolve()
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "sleeping_tool.py").write_text(SLEEPING_TOOL)
    for name, overrides in ARMS[given.case].items():
        found = run(name, overrides, given)
        measured = {key: round(value, 3) for key, value in found.items()}
        print(json.dumps({"arm": name, **measured, "step_over_bound": round(found["step"] / found["bound"], 3)}), flush=True)


if __name__ == "__main__":
    main()
