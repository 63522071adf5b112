"""What a reward function is asked, and what it may return."""

import numpy as np
import pytest

from verl_rc.algorithm.rewards.sample import RewardError, RewardOutput, RewardSample, as_reward_output
from verl_rc.records.dataset import PromptRow


def test_a_sample_takes_its_prompts_fields_and_names_itself():
    row = PromptRow(5, [1, 2], [{"role": "user", "content": "21"}], "digits", "12", {"index": 9})
    sample = RewardSample.from_row(row, 100 * "ab", reward_model_score=0.5)
    assert sample == RewardSample(5, "digits", "12", {"index": 9}, 100 * "ab", 0.5)
    assert str(sample) == f"row 5 (data_source 'digits', response '{40 * 'ab'}')"


@pytest.mark.parametrize("value", [0.5, 1, True, np.float32(0.5), np.int64(2)])
def test_a_bare_number_is_score_and_accuracy(value):
    output = as_reward_output(value, "row 0")
    assert output == RewardOutput(float(value), {"acc": float(value)})
    assert type(output.score) is float


def test_a_dict_keeps_its_extras():
    output = as_reward_output({"score": -1, "acc": False, "pred": "7"}, "row 0")
    assert output == RewardOutput(-1.0, {"acc": 0.0, "pred": "7"})
    assert type(output.extras["acc"]) is float


def test_a_dict_without_accuracy_stays_so():
    assert as_reward_output({"score": 0.25, "acc": None}, "row 0").extras == {"acc": None}
    assert as_reward_output({"score": 0.25}, "row 0").extras == {}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "the score of a reward function must be a finite number, got None .NoneType. for row 7"),
        ("1.0", "got '1.0' .str. for row 7"),
        (float("nan"), "got nan .float. for row 7"),
        ({"score": float("inf")}, "got inf .float. for row 7"),
        (-1e39, "got -1e.39 .float. for row 7"),  # scores are kept in float32
        ({"score": "high"}, "got 'high' .str. for row 7"),
        ({"acc": 1.0}, "has 'score'.*for row 7 it returned a dict with the keys .'acc'"),
        ({"score": 1.0, 3: "x"}, "keys that are strings; for row 7"),
        ({"score": 1.0, "acc": "yes"}, "the acc of a reward function must be a finite number, got 'yes'"),
        ([1.0], "got .1.0. .list. for row 7"),
    ],
)
def test_anything_else_is_refused_and_names_the_sample(returned, message):
    with pytest.raises(ValueError, match=message):
        as_reward_output(returned, "row 7")


def test_extras_become_plain_values():
    output = as_reward_output(
        {
            "score": np.array(0.5),
            "flag": np.bool_(True),
            "count": np.int64(3),
            "list": (np.float32(0.5), None),
        },
        "row 0",
    )
    assert output == RewardOutput(0.5, {"flag": True, "count": 3, "list": [0.5, None]})
    assert [type(output.extras[name]) for name in ("flag", "count")] == [bool, int]


@pytest.mark.parametrize("value", [object(), np.zeros(2), b"text", {"deep": [{1, 2}]}])
def test_extras_that_cannot_be_written_are_refused(value):
    with pytest.raises(
        RewardError,
        match=r"numbers, texts, None, or lists and dicts of those, got .* under 'extra' for row 7",
    ):
        as_reward_output({"score": 1.0, "extra": value}, "row 7")


OF_THE_RUN = ["input", "output", "gts", "step", "reward", "reward_failure", "overlong", "overlong_reward"]


@pytest.mark.parametrize("name", [*OF_THE_RUN, "reward_model_score", "env/moves", "reward/output"])
def test_a_column_with_a_name_of_the_run_is_kept_under_a_prefix(name):
    output = as_reward_output({"score": 1.0, name: 7, "other": 8}, "row 0")
    assert output.extras == {f"reward/{name}": 7, "other": 8}


def test_names_of_the_function_stay_apart_from_each_other():
    returned = {"score": 1.0, "output": 1, "reward/output": 2, "reward/reward/output": 3}
    assert sorted(as_reward_output(returned, "row 0").extras.values()) == [1, 2, 3]
