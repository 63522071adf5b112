"""Reward functions from a user's file."""

from pathlib import Path

import pytest

from verl_rc.rewards.dispatch import load_reward_function

SOURCE = """
import asyncio

LIMIT = 3

def compute_score(data_source, solution_str, ground_truth, extra_info, weight=1.0):
    return {"score": weight * len(solution_str), "acc": 1.0, "info": extra_info}

async def slowly(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return 0.25

def catch_all(**everything):
    return sorted(everything)

def too_narrow(solution_str, ground_truth):
    return 1.0
"""
ARGUMENTS = {"data_source": "s", "solution_str": "four", "ground_truth": "4", "extra_info": {"index": 3}}


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE)
    return str(tmp_path / "mine.py")


def test_keyword_arguments_are_filled_in(path):
    function = load_reward_function(path, "compute_score", {"weight": 0.5})
    assert function(**ARGUMENTS) == {"score": 2.0, "acc": 1.0, "info": {"index": 3}}
    assert load_reward_function(path, "catch_all", {"b": 1})(**ARGUMENTS) == sorted([*ARGUMENTS, "b"])


def test_async_functions_run_to_their_end(path):
    assert load_reward_function(path, "slowly")(**ARGUMENTS) == 0.25


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("missing", {}, r"must name a function of .*mine.py, got 'missing'; its functions are \['catch_all', 'compute"),
        ("LIMIT", {}, "must name a function"),
        ("too_narrow", {}, r"too_narrow of .* must accept the keyword arguments data_source.*too_narrow\(solution_str"),
        ("compute_score", {"wieght": 2}, r"reward_kwargs \(\['wieght'\]\)"),
    ],
)
def test_wrong_functions_are_refused_when_loaded(path, name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        load_reward_function(path, name, kwargs)


@pytest.mark.parametrize("name", ["missing.py", "mine.txt"])
def test_wrong_files_are_refused(tmp_path, name):
    (tmp_path / "mine.txt").write_text(SOURCE)
    with pytest.raises(ValueError, match=r"custom_reward_function.path must be an existing Python file"):
        load_reward_function(str(tmp_path / name), "compute_score")


def test_a_file_that_cannot_be_imported_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there")
    with pytest.raises(ValueError, match=r"broken.py' raised ModuleNotFoundError"):
        load_reward_function(str(tmp_path / "broken.py"), "compute_score")
