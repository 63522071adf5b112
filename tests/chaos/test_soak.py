"""An asynchronous run of an hour with faults: an engine killed every minute, a tool that now and then raises
or never answers.

Run by hand: ``SOAK_MINUTES=60 pytest tests/chaos/test_soak.py -m chaos -s``; without the variable it takes
six minutes. On a busy machine, where an engine takes longer to start, ``SOAK_KILL_SECONDS=120`` leaves more
time between two kills than a minute. ``SUMS`` may name a folder with ``data`` and ``sft_model`` of
recipes/digits_cpu_tools.sh; else they are made.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_runs import left_over_processes, marked_environment, marked_memory, metrics_of
from small_runs import ROOT

from verl_rc.runtime.checkpoint import CheckpointStore, SavedRun

pytestmark = pytest.mark.chaos
MINUTES = float(os.environ.get("SOAK_MINUTES", "6"))
SECONDS_BETWEEN_KILLS = int(os.environ.get("SOAK_KILL_SECONDS", "60"))
FAULTY_TOOL = """
import random
import time

from verl_rc.runtime.rollout.tools import Tool, evaluate_expression


def calculate(expression: str) -> str:
    chance = random.random()
    if chance < 0.0005:
        time.sleep(3600)
    if chance < 0.004:
        raise ConnectionError("the calculator is away")
    return evaluate_expression(expression)


CALCULATOR = Tool("calculator", "Evaluates an expression.", {"expression": "What to evaluate."}, calculate)
"""


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``data`` and ``sft_model``, made as the recipe says."""
    if "SUMS" in os.environ:
        return Path(os.environ["SUMS"])
    folder = tmp_path_factory.mktemp("sums")
    data, python = folder / "data", sys.executable
    fits = [f"data.{part}_files={data / f'sft_{part}.parquet'}" for part in ("train", "val")]
    model = [
        f"model.path={folder / 'base_model'}",
        f"trainer.output_dir={folder / 'sft_model'}",
        "trainer.stop_at_accuracy=0.6",
    ]
    for command in (
        [python, "scripts/prepare_data/sums.py", "--output_dir", str(data)],
        [python, "scripts/make_tiny_model.py", "--output_dir", str(folder / "base_model")],
        [python, "-m", "verl_rc.main_sft", *fits, *model],
    ):
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@contextmanager
def measured_memory(samples: list[tuple[float, int]]) -> Iterator[None]:
    """Add minutes since the beginning and the bytes of all processes of the run, every ten seconds."""
    over, began = threading.Event(), time.monotonic()

    def measure() -> None:
        while not over.wait(10):
            samples.append(((time.monotonic() - began) / 60, marked_memory()))

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_faults_lose_nothing_and_memory_stays_flat(sums: Path, tmp_path: Path) -> None:
    folder, memory = tmp_path / "run", list[tuple[float, int]]()
    (tmp_path / "faulty_tool.py").write_text(FAULTY_TOOL)
    overrides = [
        f"trainer.total_training_steps={10**6}",
        "trainer.total_epochs=1000",
        *(
            "trainer.test_freq=-1",
            "trainer.val_before_train=False",
            "trainer.save_freq=25",
            "trainer.max_actor_ckpt_to_keep=1",
        ),
        "trainer.logger=[console]",
        "trainer.report=never",
        "async_training.group_timeout_seconds=120",
        "actor_rollout_ref.rollout.multi_turn.tools=[faulty_tool:CALCULATOR]",
        "actor_rollout_ref.rollout.multi_turn.tool_timeout_seconds=10",
        "actor_rollout_ref.actor.optim.lr=1e-9",
    ]
    run = [sys.executable, str(ROOT / "tests" / "helpers" / "faults" / "disturbed_run.py")]
    kills = ["engine", "SIGKILL", "clock", str(SECONDS_BETWEEN_KILLS), "-", "--"]
    environment = marked_environment() | {
        "PYTHON": str(tmp_path / "python"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "MODEL_PATH": str(sums / "sft_model"),
        "DATA_DIR": str(sums / "data"),
        "RUN_DIR": str(folder),
    }
    # The recipe's "python -m verl_rc.main_ppo" becomes the same with disturbances.
    (tmp_path / "python").write_text(f'#!/bin/sh\nshift 2\nexec {" ".join([*run, *kills])} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    command = ["bash", str(ROOT / "recipes" / "digits_cpu_async_tools.sh"), *overrides]
    with (tmp_path / "log").open("w") as log, measured_memory(memory):
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            process.wait(MINUTES * 60)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(300)
    said = (tmp_path / "log").read_text()
    assert process.returncode == 143, said[-3000:]  # it was told to end, and saved what it had
    assert not left_over_processes()

    metrics = metrics_of(folder)
    steps = sorted(step for step in metrics if step > 0)
    assert steps == list(range(1, steps[-1] + 1))
    lost = sum(metrics[step]["recovery/engines_replaced"] for step in steps)
    failed = sum(metrics[step]["async/failed_groups"] for step in steps)
    assert lost >= 0.5 * MINUTES * 60 / SECONDS_BETWEEN_KILLS
    assert "failed and is sampled once more" in said

    (checkpoint,) = [
        path
        for path in CheckpointStore(folder, None).newest_first()
        if path.name == f"global_step_{steps[-1]}"
    ]
    supply = SavedRun.load(checkpoint).state.supply
    ended = sum(totals.groups for totals in supply.book.ended.values())
    assert ended + supply.num_groups == supply.book.admitted, "every number once"
    assert supply.book.ended["trained"].groups == steps[-1] * 32

    half = [size for minutes, size in memory if memory[-1][0] / 3 < minutes < 2 * memory[-1][0] / 3]
    late = [size for minutes, size in memory if minutes > 2 * memory[-1][0] / 3]
    growth = statistics.median(late) / statistics.median(half)
    print(
        json.dumps(
            {"minutes": MINUTES, "steps": steps[-1], "lost": lost, "failed_groups": failed, "growth": growth}
        )
    )
    assert growth < 1.05, f"memory grew {growth:.3f} times from the second third of the run to the last"
