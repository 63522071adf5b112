"""Every response gets its output from the right place, and a failure stops the run or is counted."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from verl_rc.algorithm.rewards import RewardError, RewardOutput, RewardSample
from verl_rc.config.task import RewardConfig
from verl_rc.metrics import check_names, reduce_metrics
from verl_rc.records.dataset import PromptRow
from verl_rc.runtime.workers.reward_pool import RewardPool
from verl_rc.trainer.cluster.model_groups import RewardModel
from verl_rc.trainer.scoring import (
    FAILURE_COLUMN,
    ResponseScorer,
    extra_columns,
    may_hang,
    open_scorer,
    reward_metrics,
    with_accuracies,
)

OWN = {"custom_reward_function": {"path": "mine.py"}}
MODEL = {"reward_model": {"enable": True, "model_path": "judge"}}
INSTEAD = {"failure_score": -2.0}


def row(data_source: str, ground_truth: object = "12") -> PromptRow:
    return PromptRow(30, [1], [{"role": "user", "content": "21"}], data_source, ground_truth, {})


class FakePool:
    """Scores backwards; ``"bad"`` responses fail."""

    def results(self, samples: Sequence[RewardSample]) -> Iterator[tuple[int, RewardOutput | RewardError]]:
        for place in reversed(range(len(samples))):
            sample = samples[place]
            if sample.solution_str == "bad":
                yield place, RewardError(f"it hung for {sample}.")
            else:
                yield (
                    place,
                    RewardOutput(float(len(sample.solution_str)), {"judged": sample.reward_model_score}),
                )


class FakeModel:
    """A response's length is its score; it has none for ``"long"``."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def score(self, conversations: Sequence[Sequence[dict[str, Any]]]) -> list[float | str]:
        self.seen += conversations
        texts = [conversation[-1]["content"] for conversation in conversations]
        return ["it is too long" if text == "long" else float(len(text)) for text in texts]


def scorer(*sections: dict[str, object]) -> ResponseScorer:
    config = RewardConfig.model_validate(
        {key: value for section in sections for key, value in section.items()}
    )
    if config.custom_reward_function.path is not None:  # the pool loads it, not the driver
        assert may_hang(config, "anything")
    model = FakeModel() if config.reward_model.enable else None
    return ResponseScorer(config, cast(RewardPool, FakePool()), cast(RewardModel, model))


def test_fast_rules_run_here_and_algebra_in_the_pool() -> None:
    rows = [row("digits"), row("lighteval/MATH"), row("openai/gsm8k"), row("aime2024"), row("digits")]
    outputs = scorer().score(rows, ["12", "four", "#### 12", "seven00", "13"])
    assert [output.score for output in outputs] == [1.0, 4.0, 1.0, 7.0, 0.0]


def test_a_function_of_ones_own_scores_everything_in_the_pool() -> None:
    outputs = scorer(OWN).score([row("digits"), row("riddles")], ["12", "four"])
    assert [output.score for output in outputs] == [2.0, 4.0]


def test_the_reward_models_score_is_the_score() -> None:
    judged = scorer(MODEL)
    outputs = judged.score([row("riddles"), row("digits")], ["abc", "12345"])
    assert outputs == [RewardOutput(3.0), RewardOutput(5.0)]
    seen = cast(Any, judged)._model.seen
    assert seen[0] == [{"role": "user", "content": "21"}, {"role": "assistant", "content": "abc"}]


def test_a_function_of_ones_own_gets_the_models_score() -> None:
    outputs = scorer(OWN, MODEL, INSTEAD).score([row("x"), row("x")], ["abc", "long"])
    assert outputs[0] == RewardOutput(3.0, {"judged": 3.0})
    assert outputs[1].score == -2.0
    assert (
        outputs[1]
        .extras["reward_failure"]
        .startswith("it is too long; this happened for row 30 (data_source 'x'")
    )


@pytest.mark.parametrize(
    ("sections", "source", "text", "message"),
    [
        (
            [OWN],
            "mine",
            "bad",
            r"it hung for row 30 \(data_source 'mine', response 'bad'\). The run stops: correct",
        ),
        (
            [MODEL],
            "mine",
            "long",
            r"it is too long; this happened for row 30 \(data_source 'mine', response 'long'\)",
        ),
        (
            [],
            "openai/gsm8k",
            "#### 4",
            r"raised ValueError: the ground truth .* for row 30 \(data_source 'openai/gsm8k'",
        ),
    ],
)
def test_a_failure_stops_the_run_and_says_how_to_go_on(
    sections: list[dict[str, object]], source: str, text: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message) as raised:
        scorer(*sections).score([row(source), row(source, "no number")], ["#### 12", text])
    assert "pass reward.failure_score=<number>" in str(raised.value)


def test_a_failure_gets_the_score_given_and_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="verl_rc"):
        outputs = scorer(OWN, INSTEAD).score([row("mine")] * 4, ["abc", "bad", "d", "bad"])
    assert [output.score for output in outputs] == [3.0, -2.0, 1.0, -2.0]
    assert ["reward_failure" in output.extras for output in outputs] == [False, True, False, True]
    assert (
        "reward: 2 of 4 responses failed; one of them: it hung for row 30 (data_source 'mine', response "
        "'bad')" in caplog.text
    )
    assert (
        reduce_metrics(reward_metrics(extra_columns(outputs), len(outputs)))["reward/failed_fraction"] == 0.5
    )


@pytest.mark.parametrize("policy", [{}, INSTEAD])
def test_algebra_without_end_is_a_wrong_answer_and_counted(policy: dict[str, object]) -> None:
    outputs = scorer(policy).score(
        [row("lighteval/MATH"), row("math_dapo"), row("math_dapo")], ["bad", "bad", "four"]
    )
    assert [output.score for output in outputs] == [0.0, -1.0, 4.0]
    assert [output.extras.get("acc") for output in outputs] == [0.0, 0.0, None]
    metrics = reduce_metrics(reward_metrics(extra_columns(outputs), len(outputs)))
    assert metrics["reward/failed_fraction"] == pytest.approx(2 / 3)


def test_a_failed_sample_is_not_right_where_samples_are_right_or_wrong() -> None:
    rows = [row("digits"), row("openai/gsm8k", "no number"), row("lighteval/MATH")]
    outputs = scorer(INSTEAD).score(rows, ["12", "#### 4", "four"])
    assert [output.score for output in outputs] == [1.0, -2.0, 4.0]
    extras = {name: [output.extras.get(name) for output in outputs] for name in ("acc", FAILURE_COLUMN)}
    assert extras["acc"] == [1.0, None, None]
    assert with_accuracies(extras)["acc"] == [1.0, 0.0, None]
    assert with_accuracies({FAILURE_COLUMN: ["why"]}) == {FAILURE_COLUMN: ["why"]}  # none of them has one


def test_metrics_of_columns_count_the_rows_that_have_them_over_all_batches() -> None:
    first = [
        RewardOutput(1.0, {"acc": 1.0, "pred": "7", "length": 3}),
        RewardOutput(0.0, {"acc": 0.0, "length": None}),
    ]
    second = [
        RewardOutput(0.5, {"acc": 0.5, "length": float("nan")}),
        RewardOutput(0.5, {"acc": 1.0, "length": 5}),
    ]
    metrics = reduce_metrics(
        [
            *reward_metrics(extra_columns(first), len(first)),
            *reward_metrics(extra_columns(second), len(second)),
        ]
    )
    assert metrics == {
        "reward/failed_fraction": 0.0,
        "reward/acc/mean": 0.625,
        "reward/acc/max": 1.0,
        "reward/acc/min": 0.0,
        "reward/length/mean": 4.0,
        "reward/length/max": 5.0,
        "reward/length/min": 3.0,
    }
    check_names(set(metrics))


def test_unknown_sources_are_refused_before_anything_starts() -> None:
    sources = {"digits": "row 0 of train.parquet", "riddles": "row 7 of train.parquet"}
    message = r"row 7 of train.parquet: data_source must be one that has a scorer, got 'riddles'"
    with pytest.raises(ValueError, match=message), open_scorer(RewardConfig(), sources, 60.0):
        pass


def test_fast_rules_need_no_process_and_functions_are_checked_at_once(tmp_path: Any) -> None:
    with open_scorer(RewardConfig(), {"digits": "row 0"}, 60.0) as ready:
        assert ready.score([row("digits")], ["12"])[0].score == 1.0
        assert ready._pool is None
    (tmp_path / "mine.py").write_text("def compute_score(solution_str, **_):\n    return len(solution_str)\n")
    custom = {"path": str(tmp_path / "mine.py")}
    own = RewardConfig.model_validate({"custom_reward_function": custom, "num_workers": 1})
    with open_scorer(own, {"riddles": "row 0"}, 60.0) as ready:
        assert ready.score([row("riddles")], ["four"])[0].score == 4.0
    wrong = RewardConfig.model_validate(
        {"custom_reward_function": {**custom, "name": "judge"}, "num_workers": 1}
    )
    message = r"must name a function of .*got 'judge'"
    with pytest.raises(ValueError, match=message), open_scorer(wrong, {"riddles": "row 0"}, 60.0):
        pass
