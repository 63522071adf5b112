"""What asynchronous training gains on this machine: steps of real runs, sides measured in the same run.

Usage: python scripts/bench/asynchronous.py ratios|tools|environment --model FOLDER --data FOLDER [--steps N]
[--folder DIR]

``ratios``: the quickstart one step off, with sampling about 0.5, 1 and 2 times as long as training. A step
should take the longer of both sides and the publication. ``tools``: sums with a calculator that sleeps (model
and data of recipes/digits_cpu_tools.sh), in turns and 1 and 3 steps off, and with whole responses. From the
run in turns alone, on one core, simulated engines predict the steps of those with partial rollouts.
``environment``: 64 episodes a step of the guessing game (model and data of
recipes/digits_cpu_environment.sh) whose environment waits 1 s a turn in the mean, in the engine's process, in
one host and in four. A step should take the longest of sampling, the longest episode's waits, and training.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

from transformers import AutoTokenizer

from verl_rc.insight.timeline import read_timeline
from verl_rc.rollout.tools import ToolError, evaluate_expression

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from simulated_engines import Mode, Turn, Turns, conversations, run_loop  # noqa: E402  (the tests' own engines)

WAITING = {"gen", "step", "admit"}
PUBLISHING = {"update_weights", "sync_canary"}
SLEEPING_TOOL = """
import random
import time

from verl_rc.rollout.tools import Tool, evaluate_expression


def seconds(expression: str) -> float:
    return min(4.0, random.Random(expression).lognormvariate(-1.24, 0.8))  # 0.4 in the mean


def calculate(expression: str) -> str:
    time.sleep(seconds(expression))
    return evaluate_expression(expression)


CALCULATOR = Tool("calculator", "Evaluates an expression.", {"expression": "What to evaluate."}, calculate)
"""
SLOW_GAME = """
import asyncio
import random
from dataclasses import replace

from verl_rc.rollout.environments.guess import GuessNumber


class SlowGame(GuessNumber):
    async def step(self, turn):
        rng = random.Random(f"{self._secret} {turn.number} {turn.text}")
        seconds = min(4.0, rng.lognormvariate(-0.32, 0.8))
        await asyncio.sleep(seconds)  # 1 in the mean
        reply = await super().step(turn)
        return replace(reply, metrics={**reply.metrics, "waited": seconds})
"""
RECIPES = {
    "ratios": "quickstart_digits_cpu",
    "tools": "digits_cpu_tools",
    "environment": "digits_cpu_environment",
}
ON_ONE_CORE = "in turns on one core"
"""Each side alone with what it has beside the other one."""
ONE_OFF = ["async=one_step_off"]
WHOLE = [*ONE_OFF, "async_training.staleness_threshold=2"]
PARTIAL = ["async=partial", "async_training.staleness_threshold=2"]
ARMS = {
    "ratios": {
        "0.5": [*ONE_OFF, "actor_rollout_ref.actor.ppo_epochs=2"],
        "1": ONE_OFF,
        "2": [*ONE_OFF, "actor_rollout_ref.rollout.max_num_seqs=48"],
    },
    "tools": {
        ON_ONE_CORE: [],
        "in turns": [],
        "1 step off": ["async=partial"],
        "3 steps off": ["async=partial", "async_training.staleness_threshold=3"],
        "whole 2 steps off": WHOLE,
        "whole 2 steps off loaded beside": [
            *WHOLE,
            "actor_rollout_ref.rollout.checkpoint_engine.stage_updates=True",
        ],
    },
    "environment": {
        f"{way} {hosts} hosts": [*mode, f"actor_rollout_ref.rollout.environment.hosts={hosts}"]
        for way, mode in (("in turns", []), ("1 step off", ONE_OFF), ("2 steps off and cut", PARTIAL))
        for hosts in (0, 1, 4)
    },
}
OF_CASE = {
    "ratios": [],
    "tools": [
        "actor_rollout_ref.rollout.multi_turn.tools=[slow:CALCULATOR]",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ],
    "environment": [
        "actor_rollout_ref.rollout.environment.name=slow:SlowGame",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_epochs=16",  # training takes some seconds, too
    ],
}


def run(name: str, overrides: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Medians over the steps of a run, without the first four and the last, which are not like the others."""
    folder = options.folder / name.replace(" ", "_")
    settings = {
        "PYTHON": sys.executable,
        "MODEL_PATH": str(options.model),
        "DATA_DIR": str(options.data),
        "RUN_DIR": str(folder),
    }
    settings |= {
        "CORRECTION": "decoupled_token_is",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(options.folder)]),
    }
    short = [
        f"trainer.total_training_steps={options.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
    ]
    short += ["trainer.save_freq=-1", "trainer.logger=[console]", "async_training.trace=True"]
    short += [f"trainer.rollout_data_dir={folder}/rollouts"]
    command = [
        "bash",
        str(ROOT / "recipes" / f"{RECIPES[options.case]}.sh"),
        *OF_CASE[options.case],
        *short,
        *overrides,
    ]
    if name == ON_ONE_CORE:
        command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command]
    with (options.folder / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, stdout=log, stderr=log, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if 4 < line["step"] < options.steps]
    timeline = read_timeline(folder)

    def sampled(step: int) -> float:
        return sum(span.seconds for span in timeline.between(step, step).spans if span.activity == "decode")

    def stages(line: dict[str, float], is_chosen: bool, names: set[str]) -> float:
        timed = {
            name.removeprefix("timing_s/"): value
            for name, value in line.items()
            if name.startswith("timing_s/")
        }
        return sum(value for name, value in timed.items() if (name in names) is is_chosen)

    median = statistics.median
    results = {
        "step": median(line["timing_s/step"] for line in steps),
        "mean_step": statistics.mean(line["timing_s/step"] for line in steps),
        "mean_waiting": statistics.mean(line.get("timing_s/gen", 0.0) for line in steps),
        "sampling": median(sampled(line["step"]) for line in steps),
        "training": median(stages(line, False, WAITING | PUBLISHING) for line in steps),
        "publishing": median(stages(line, True, PUBLISHING) for line in steps),
        "waiting": median(line.get("timing_s/gen", 0.0) for line in steps),
    }
    if options.case == "environment":
        results["environment"] = median(line["env/waited/max"] for line in steps)
    longest = max(results["sampling"], results["training"], results.get("environment", 0.0))
    return results | {"bound": longest + results["publishing"]}


def recorded_groups(folder: Path, model: Path) -> list[list[Turns]]:
    """The conversations of each prompt: tokens that the policy wrote, and seconds that the calculator
    took."""
    from slow import seconds  # written by ``main``

    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokens(text: str) -> int:
        return 1 + len(tokenizer(text, add_special_tokens=False).input_ids)  # one ends the turn

    def turns(text: str) -> Turns:
        call = re.match("(.*?<tool>(.*?)</tool>)(.*)", text, re.DOTALL)
        if call is None:
            return (Turn(tokens(text)),)
        first, expression, rest = call.groups()
        try:
            answer = evaluate_expression(expression)
        except ToolError:
            answer = ""
        return (Turn(tokens(first), seconds(expression)), Turn(tokens(rest.removeprefix(answer))))

    groups = defaultdict(list)
    for path in sorted((folder / "rollouts").glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            groups[line["step"], json.dumps(line["input"])].append(turns(line["output"]))
    return list(groups.values())


def simulated_step(groups: list[list[Turns]], decode_ms: float, training: float, ahead: int) -> float:
    """Seconds of a step, the mean of 300, whose prompts are drawn from ``groups``."""
    cluster = conversations(decode_ms, training, 4, lambda rng: rng.choice(groups))
    mode = Mode(Fraction(ahead), Fraction(ahead + 1), order="ready") if ahead else Mode()
    return run_loop(mode, cluster, publications=310, warm_up=10).step_seconds


def predictions(groups: list[list[Turns]], alone: dict[str, float]) -> dict[str, float]:
    """Seconds of a step by arm; a decode step takes what makes the simulated step in turns as long as the
    real one."""
    training = alone["mean_step"] - alone["mean_waiting"]
    low, high = 0.1, 1000.0
    for _ in range(20):
        middle = math.sqrt(low * high)
        too_long = simulated_step(groups, middle, training, 0) > alone["mean_step"]
        low, high = (low, middle) if too_long else (middle, high)
    steps = {
        arm: simulated_step(groups, low, training, ahead)
        for arm, ahead in (("1 step off", 1), ("3 steps off", 3))
    }
    return {"decode_ms": low, **steps}


def main() -> None:
    """Run the arms one after the other and print a line of JSON for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=ARMS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_asynchronous"))
    options = parser.parse_args()
    options.folder, options.model, options.data = (
        options.folder.resolve(),
        options.model.resolve(),
        options.data.resolve(),
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "slow.py").write_text(SLEEPING_TOOL + SLOW_GAME)
    sys.path.insert(0, str(options.folder))
    predicted = dict[str, float]()
    for name, overrides in ARMS[options.case].items():
        results = run(name, overrides, options)
        if name == ON_ONE_CORE:
            predicted = predictions(
                recorded_groups(options.folder / name.replace(" ", "_"), options.model), results
            )
        if name in predicted:
            results |= {
                "predicted": predicted[name],
                "predicted_over_mean": predicted[name] / results["mean_step"],
            }
        rounded = {key: round(value, 3) for key, value in results.items()}
        print(
            json.dumps(
                {"arm": name, **rounded, "step_over_bound": round(results["step"] / results["bound"], 3)}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
