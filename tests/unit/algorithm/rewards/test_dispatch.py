"""Reward functions from a user's file, and every row finds its scorer, or an error says which are known."""

import asyncio
import inspect
from pathlib import Path

import pytest

from verl_rc.algorithm.rewards import (
    RewardError,
    RewardSample,
    build_reward,
    check_data_sources,
    dapo_math,
    exact_match,
    find_scorer,
    geometry,
    gsm8k,
    math_answer,
    register_scorer,
    score_on_timeout,
)
from verl_rc.algorithm.rewards.dispatch import load_reward_function
from verl_rc.config.task import RewardConfig

SOURCE = """
import asyncio, functools

LIMIT = 3

def compute_score(data_source, solution_str, ground_truth, extra_info, weight=1.0):
    return {"score": weight * len(solution_str), "acc": 1.0, "info": extra_info}

async def slowly(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return 0.25

class Slow:
    async def __call__(self, **_):
        return 0.25

class Judge:
    def __call__(self, **_):
        return 1.0

SLOW, PART, JUDGE = Slow(), functools.partial(slowly), Judge()

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


@pytest.mark.parametrize(
    ("name", "is_async"),
    [("slowly", True), ("SLOW", True), ("PART", True), ("compute_score", False), ("JUDGE", False)],
)
def test_an_async_function_is_known_and_awaited(path, name, is_async):
    section = {"path": path, "name": name}
    reward = build_reward(RewardConfig.model_validate({"custom_reward_function": section}))
    assert reward.is_async == is_async
    started = reward.start(sample("s", "x"))
    output = asyncio.run(started) if inspect.iscoroutine(started) else started
    assert output.score == (0.25 if is_async else 1.0)


def test_only_the_calls_of_an_async_function_overlap(path):
    fields = {"custom_reward_function": {"path": path}, "max_concurrent": 2}
    with pytest.raises(
        ValueError, match=r"reward.max_concurrent=2 needs an `async def`, and compute_score of .* is none"
    ):
        build_reward(RewardConfig.model_validate(fields))
    with pytest.raises(ValueError, match=r"max_concurrent must be 1 without reward.custom_reward"):
        RewardConfig.model_validate({"max_concurrent": 2})


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "missing",
            {},
            r"must name a function of .*mine.py, got 'missing'; it has \['JUDGE', .*'catch_all', 'compute",
        ),
        ("LIMIT", {}, "must name a function"),
        (
            "too_narrow",
            {},
            r"too_narrow of .* must accept the keyword arguments data_source.*too_narrow\(solution_str",
        ),
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


def sample(data_source: str, solution_str: str, ground_truth: object = "12") -> RewardSample:
    return RewardSample(5, data_source, ground_truth, {"index": 9}, solution_str)


@pytest.mark.parametrize(
    ("source", "scorer"),
    [
        ("digits", exact_match),
        ("openai/gsm8k", gsm8k),
        ("lighteval/MATH", math_answer),
        ("DigitalLearningGmbH/MATH-lighteval", math_answer),
        ("HuggingFaceH4/MATH-500", math_answer),
        ("hiyouga/geometry3k", geometry),
        ("math_dapo", dapo_math),
        ("aime2024", dapo_math),
        ("numina_olympiads", math_answer),
    ],
)
def test_known_sources(source, scorer):
    assert find_scorer(source) is scorer


def test_an_unknown_source_lists_known_ones_and_the_way_out():
    with pytest.raises(
        ValueError, match=r"got 'gsm8k'; known are .*'digits'.*'openai/gsm8k'.*custom_reward_function.path"
    ):
        find_scorer("gsm8k")


def test_registered_scorers_are_found_and_names_are_not_taken_twice():
    @register_scorer("test_dispatch/half")
    def half(solution_str, ground_truth):
        return 0.5

    assert build_reward(RewardConfig())(sample("test_dispatch/half", "x")).score == 0.5
    assert register_scorer("test_dispatch/half")(half) is half
    with pytest.raises(ValueError, match="'digits' already has a scorer"):
        register_scorer("digits")(half)


def test_builtin_reward_scores_a_row():
    reward = build_reward(RewardConfig())
    assert reward(sample("digits", " 12 ")).score == 1.0
    assert dict(reward(sample("digits", "13")).extras) == {"acc": 0.0, "pred": "13"}


def test_a_function_of_ones_own_goes_before_the_builtin_one(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def judge(data_source, solution_str, ground_truth, extra_info, bonus):\n"
        "    return {'score': bonus, 'seen': [data_source, solution_str, ground_truth, extra_info]}\n"
    )
    section = {"path": str(tmp_path / "mine.py"), "name": "judge", "reward_kwargs": {"bonus": 0.75}}
    reward = build_reward(RewardConfig.model_validate({"custom_reward_function": section}))
    output = reward(sample("digits", "text"))
    assert output.score == 0.75
    assert output.extras["seen"] == ["digits", "text", "12", {"index": 9}]


def test_a_function_of_ones_own_gets_the_score_of_the_reward_model(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(reward_model_score, **_):\n    return 2 * reward_model_score\n"
    )
    sections = {"custom_reward_function": {"path": str(tmp_path / "mine.py")}}
    model = {"enable": True, "model_path": "unused"}
    judged = RewardSample(5, "anything", None, {}, "text", reward_model_score=0.25)
    output = build_reward(RewardConfig.model_validate({**sections, "reward_model": model}))(judged)
    assert (output.score, dict(output.extras)) == (0.5, {"acc": 0.5, "reward_model_score": 0.25})
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1\n"
    )
    with pytest.raises(
        ValueError, match=r"must accept the keyword arguments .*extra_info, reward_model_score"
    ):
        build_reward(RewardConfig.model_validate({**sections, "reward_model": model}))


def test_every_unknown_source_of_the_data_is_named_with_its_place():
    check_data_sources({"digits": "row 0 of a", "aime2025": "row 1 of a"})
    with pytest.raises(
        ValueError, match=r"row 3 of a.parquet: .*got 'riddles'[\s\S]*\nrow 8 of b.parquet: .*got 'chess'"
    ):
        check_data_sources(
            {"riddles": "row 3 of a.parquet", "digits": "row 0", "chess": "row 8 of b.parquet"}
        )


def test_only_algebra_may_stay_undecided_and_is_wrong_then():
    assert [score_on_timeout(source) for source in ("digits", "openai/gsm8k")] == [None, None]
    for source in ("lighteval/MATH", "aime2024"):
        wrong = find_scorer(source)(r"Answer: \boxed{3}", "4")
        assert (score_on_timeout(source), 0.0) == (wrong["score"], wrong["acc"])


def test_errors_name_the_row(tmp_path):
    place = r"row 5 \(data_source 'openai/gsm8k', response '#### 4'\)"
    with pytest.raises(
        RewardError, match=rf"raised ValueError: the ground truth of .*scorers.py:\d+, in gsm8k\) for {place}"
    ):
        build_reward(RewardConfig())(sample("openai/gsm8k", "#### 4", "no number"))
    (tmp_path / "mine.py").write_text("def compute_score(**_):\n    return 'good'\n")
    section = {"path": str(tmp_path / "mine.py")}
    reward = build_reward(RewardConfig.model_validate({"custom_reward_function": section}))
    with pytest.raises(ValueError, match=r"got 'good' \(str\) for row 5 "):
        reward(sample("digits", "text"))


def test_a_missing_function_is_found_before_the_first_step(tmp_path):
    section = {"path": str(tmp_path / "nothing.py")}
    with pytest.raises(ValueError, match=r"nothing.py"):
        build_reward(RewardConfig.model_validate({"custom_reward_function": section}))


@pytest.mark.parametrize("given", [{"reward_kwargs": {"bonus": 0.1}}, {"name": "my_score"}])
def test_settings_of_a_function_that_no_file_holds_are_refused(given):
    config = RewardConfig.model_validate({"custom_reward_function": given})
    with pytest.raises(ValueError, match=rf"no effect without .*\.path, but {next(iter(given))} was given"):
        build_reward(config)
