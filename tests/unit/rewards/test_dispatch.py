"""Every row finds its scorer, or an error says which are known."""

import pytest

from verl_rc.config.reward import RewardConfig
from verl_rc.data.dataset import PromptRow
from verl_rc.rewards import build_reward, dapo_math, exact_match, find_scorer, gsm8k, math_answer, register_scorer


def row(data_source: str, ground_truth: object = "12") -> PromptRow:
    return PromptRow(5, [1, 2], [{"role": "user", "content": "21"}], data_source, ground_truth, {"index": 9})


@pytest.mark.parametrize(
    ("source", "scorer"),
    [
        ("digits", exact_match),
        ("openai/gsm8k", gsm8k),
        ("lighteval/MATH", math_answer),
        ("DigitalLearningGmbH/MATH-lighteval", math_answer),
        ("HuggingFaceH4/MATH-500", math_answer),
        ("math_dapo", dapo_math),
        ("aime2024", dapo_math),
        ("numina_olympiads", math_answer),
    ],
)
def test_known_sources(source, scorer):
    assert find_scorer(source) is scorer


def test_an_unknown_source_lists_known_ones_and_the_way_out():
    with pytest.raises(ValueError, match=r"got 'gsm8k'; known are .*'digits'.*'openai/gsm8k'.*custom_reward_function.path"):
        find_scorer("gsm8k")


def test_registered_scorers_are_found_and_names_are_not_taken_twice():
    @register_scorer("test_dispatch/half")
    def half(solution_str, ground_truth):
        return 0.5

    assert build_reward(RewardConfig())(row("test_dispatch/half"), "x").score == 0.5
    assert register_scorer("test_dispatch/half")(half) is half
    with pytest.raises(ValueError, match="'digits' already has a scorer"):
        register_scorer("digits")(half)


def test_builtin_reward_scores_a_row():
    reward = build_reward(RewardConfig())
    assert reward(row("digits"), " 12 ").score == 1.0
    assert dict(reward(row("digits"), "13").extras) == {"acc": 0.0, "pred": "13"}


def test_a_function_of_ones_own_goes_before_the_builtin_one(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def judge(data_source, solution_str, ground_truth, extra_info, bonus):\n"
        "    return {'score': bonus, 'seen': [data_source, solution_str, ground_truth, extra_info]}\n"
    )
    section = {"path": str(tmp_path / "mine.py"), "name": "judge", "reward_kwargs": {"bonus": 0.75}}
    reward = build_reward(RewardConfig.model_validate({"custom_reward_function": section}))
    output = reward(row("digits"), "text")
    assert output.score == 0.75
    assert output.extras["seen"] == ["digits", "text", "12", {"index": 9}]


def test_errors_name_the_row(tmp_path):
    with pytest.raises(ValueError, match="GSM8K") as raised:
        build_reward(RewardConfig())(row("openai/gsm8k", "no number"), "#### 4")
    assert "row 5 (data_source 'openai/gsm8k', response '#### 4')" in raised.value.__notes__[0]
    (tmp_path / "mine.py").write_text("def compute_score(**_):\n    return 'good'\n")
    section = {"path": str(tmp_path / "mine.py")}
    reward = build_reward(RewardConfig.model_validate({"custom_reward_function": section}))
    with pytest.raises(ValueError, match=r"got 'good' \(str\) for row 5 "):
        reward(row("digits"), "text")


def test_a_missing_function_is_found_before_the_first_step(tmp_path):
    section = {"path": str(tmp_path / "nothing.py")}
    with pytest.raises(ValueError, match=r"nothing.py"):
        build_reward(RewardConfig.model_validate({"custom_reward_function": section}))
