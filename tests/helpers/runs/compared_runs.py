"""Comparing what two runs left behind, to the last bit: weights, optimizer, run state, metrics, samples."""

import json
import warnings
from collections import defaultdict
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from verl_rc.algorithm.supply.step_time import WaitTotals
from verl_rc.runtime.checkpoint import CheckpointStore, RunState, SavedRun, shards_problem
from verl_rc.runtime.checkpoint.shard_folder import read_metadata

# An engine that replaces a lost one is sent the weights, too, which sync/bytes counts.
NOT_OF_THE_TRAINING = (
    *("timing_", "perf/", "sync/canary", "sync/bytes", "recovery/", "trainer/idle_ratio"),
    *("async/wait_for_oldest_s", "async/pause_seconds", "env/wait_s", "env/hosts_lost"),
)


def without_times(state: RunState) -> RunState:
    """A state without the seconds that its steps took, and those that samples waited for replies; its groups
    are packed."""
    if state.supply is None:
        return state
    groups = deepcopy(state.supply.groups())
    for reply in (
        reply for group in groups.get("groups", ()) for one in group["samples"] for reply in one["replies"]
    ):
        reply["waited"] = 0.0
    return replace(state, supply=replace(state.supply, waits=WaitTotals(), groups=cast(Any, groups)))


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder of shards: weights and the optimizer's moments."""
    saved = read_metadata(folder).state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=str(folder), no_dist=True)
    return tensors


def committed(folder: Path) -> list[int]:
    """Steps of the checkpoints that the next start in ``folder`` finds, in the order of the steps."""
    store = CheckpointStore(folder, None)
    store.choose("auto", None, lambda checkpoint: shards_problem(checkpoint / "actor"))
    return sorted(int(path.name.removeprefix("global_step_")) for path in store.newest_first())


def metric_lines(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Every line of ``metrics.jsonl`` by step, timings apart; there must be one for each."""
    lines = defaultdict(list)
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        lines[line["step"]].append(
            {name: value for name, value in line.items() if not name.startswith(NOT_OF_THE_TRAINING)}
        )
    return lines


def lines(folder: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step, without times; every step has one line."""
    found = metric_lines(folder)
    assert all(len(of_step) == 1 for of_step in found.values())
    return {step: line for step, [line] in found.items()}


def samples(folder: Path, step: int) -> list[dict[str, Any]]:
    """Those that a step trained on."""
    return [json.loads(line) for line in (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()]


def assert_same_from(step: int, last: int, whole: Path, again: Path) -> None:
    """A run that was resumed after ``step`` leaves what the undisturbed one leaves."""
    for later in range(step + 1, last + 1):
        assert lines(again)[later] == lines(whole)[later]
        assert samples(again, later) == samples(whole, later)
        one, other = (SavedRun.load(folder / f"global_step_{later}").state for folder in (whole, again))
        assert str(without_times(one)) == str(without_times(other))


def differences(whole: Path, other: Path, last_step: int) -> list[str]:
    """In what ``other`` differs from ``whole`` up to ``last_step``, as far as it got; both keep a checkpoint
    of every step."""
    found = []
    for step in range(1, last_step + 1):
        one, two = whole / f"global_step_{step}", other / f"global_step_{step}"
        expected, given = saved_tensors(one / "actor"), saved_tensors(two / "actor")
        if expected.keys() != given.keys():
            found.append(f"step {step}: names of tensors")
        found += [f"step {step}: {name}" for name in expected if not torch.equal(expected[name], given[name])]
        states = [asdict(without_times(SavedRun.load(folder).state)) for folder in (one, two)]
        found += [
            f"step {step}: {key} of the run state"
            for key in states[0]
            if str(states[0][key]) != str(states[1][key])
        ]
        samples = [(folder / "rollouts" / f"{step}.jsonl").read_bytes() for folder in (whole, other)]
        if samples[0] != samples[1]:
            found.append(f"step {step}: prompts or samples")
    lines, whole_lines = metric_lines(other), metric_lines(whole)
    for step in range(1, last_step + 1):
        if len(whole_lines[step]) != 1 or lines[step] != whole_lines[step]:
            found.append(f"step {step}: metrics")
    return found


def prompts_in_order(folder: Path, last_step: int) -> list[str]:
    """The prompts that were trained on, step by step, each once for its samples."""
    prompts: list[str] = []
    for step in range(1, last_step + 1):
        lines = (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        prompts += dict.fromkeys(json.dumps(json.loads(line)["input"]) for line in lines)
    return prompts
