"""The package's groups: they set known keys, each its own, so that the order of groups does not matter."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from verl_rc.config.load import load_run_config
from verl_rc.config.load.command_line import parse
from verl_rc.config.load.compose import CONFIGS
from verl_rc.config.load.given import given_tree
from verl_rc.config.run import RunConfig

GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in CONFIGS.iterdir()
    if folder.is_dir()
}
WHERE_TASKS_FIT = {"digits": "cpu", "gsm8k": "1gpu", "math": "8gpu", "geo3k": "8gpu", "dapo_math": "2x8gpu"}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def keys_of(group: str) -> set[str]:
    """Every key that a choice of this group sets; a task's own model is left out."""
    without_model = ["model=null"] if group == "task" else []
    choices = [
        given_tree(RunConfig, parse([f"{group}={choice}", *without_model])).tree for choice in GROUPS[group]
    ]
    assert all(choices)
    return {key for tree in choices for key in leaves(tree)}


def test_the_groups_that_every_user_needs() -> None:
    assert set(GROUPS) == {"async", "hardware", "model", "task"}
    assert set(GROUPS["hardware"]) == {"cpu", "1gpu", "8gpu", "2x8gpu"}
    assert {"digits", "gsm8k", "math"} <= set(GROUPS["task"])


@pytest.mark.parametrize(
    ("one", "other"), [*itertools.combinations(["async", "hardware", "model", "task"], 2)]
)
def test_no_two_groups_set_the_same_key(one: str, other: str) -> None:
    assert keys_of(one) & keys_of(other) == set()


@pytest.mark.parametrize("task", GROUPS["task"])
def test_a_task_trains_without_a_recipe(task: str) -> None:
    config = load_run_config(
        [f"task={task}", f"hardware={WHERE_TASKS_FIT[task]}", "correction=decoupled_seq_is"]
    )
    assert config.algorithm.rollout_correction.rollout_is == "sequence"


@pytest.mark.parametrize("model", GROUPS["model"])
def test_a_model_takes_the_place_of_the_tasks(model: str) -> None:
    config = load_run_config(["task=math", "hardware=8gpu", f"model={model}"])
    (path,) = {config.actor_rollout_ref.model.path, config.actor_rollout_ref.ref.model_path}
    assert (path == "Qwen/Qwen2.5-7B") == (model == "qwen2.5_7b")
