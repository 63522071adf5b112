"""What a step trains on, with engines and a reward that are a table: refilling, trimming, greedy baselines,
penalties."""

from types import SimpleNamespace
from typing import Any

import pytest
from make_tiny_model import build_tokenizer
from ragged_rows import whole
from table_engines import FILTER, GREEDY_SCORE, keep_all, make_run, new_supply, prompt, sample

from verl_rc.algorithm.rewards import RewardOutput
from verl_rc.algorithm.supply.ledger import LedgerError
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.runtime.checkpoint import RunState
from verl_rc.trainer.step_record import StepRecord
from verl_rc.trainer.supply import scored_groups

REJECTION = [
    "algorithm.max_refills=2",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.9_1.1",
]


def test_without_a_filter_all_prompts_stay() -> None:
    batch, metrics = sample(make_run())
    assert [row.row_index for row in batch.prompts] == [0, 1]
    assert batch.scores.tolist() == [1, 1, 0, 1]
    assert batch.reward_baselines is batch.component_scores is None
    assert metrics["perf/rollout_tokens_per_second"] > 6
    assert not [name for name in metrics if name.startswith("training/filter_groups")]


def test_further_prompts_are_drawn_until_enough_tell_something() -> None:
    run = make_run(FILTER)
    batch, metrics = sample(run)
    assert [row.row_index for row in batch.prompts] == [1, 3]
    assert batch.rollouts.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.scores.tolist() == [0, 1, 1, 0]
    assert batch.extras["length"] == [1, 2, 1, 2]
    assert whole(batch.rollouts).tokens.responses[:, 0].tolist() == [1, 1, 3, 3]
    assert batch.rollouts.tokens.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert run.prompts.drawn == 4
    counted = {name.rpartition("/")[2]: value for name, value in metrics.items() if "filter_groups" in name}
    assert counted == {
        "evicted_samples": 4,
        "discarded_surplus_samples": 0,
        "informative_ratio": 0.5,
        "sampled_score_mean": 4 / 8,
    }


def test_what_is_left_over_is_dropped_and_counted() -> None:
    run = make_run(
        FILTER,
        "data.train_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "data.gen_batch_size=2",
    )
    run.prompts.drawn = 5
    batch, metrics = sample(run)
    assert [row.row_index for row in batch.prompts] == [5]
    assert metrics["training/filter_groups/discarded_surplus_samples"] == 2
    assert [metrics[f"ledger/{name}_tokens"] for name in ("trained", "filtered", "surplus")] == [3, 0, 3]
    assert [metrics[f"ledger/prompts_{name}"] for name in ("in_batch", "filtered", "surplus")] == [1, 0, 1]


@pytest.mark.parametrize(
    ("further", "judged", "trained", "rejected"),
    [
        ((), [[0, 1], [2]], [1, 3], 6),
        ((FILTER,), [[1, 3], [5]], [1, 6], 6),
        (("algorithm.adv_estimator=remax",), [[0, 1], [2]], [1, 3], 6 + 2 * 6),
    ],
)
def test_groups_of_which_rejection_keeps_nothing_are_replaced_as_often_as_is_asked(
    further: tuple[str, ...], judged: list[list[int]], trained: list[int], rejected: int
) -> None:
    """All but group 1 are rejected, twice; a filter leaves 1, 3, 5 and 6; a greedy response has 6 tokens."""
    seen: list[list[int]] = []

    def find_rejected(scored: ScoredBatch) -> list[int]:
        seen.append([row.row_index for row in scored.prompts])
        return [place for place, row in enumerate(seen[-1]) if row != 1]

    batch, metrics = sample(make_run(*REJECTION, *further), find_rejected)
    assert seen == judged
    assert [row.row_index for row in batch.prompts] == trained
    assert metrics["ledger/prompts_rejected"] == 2
    assert [metrics[f"ledger/{name}_tokens"] for name in ("trained", "rejected")] == [6, rejected]


def test_a_token_without_an_account_is_found_when_the_step_is_closed() -> None:
    run, record = make_run(FILTER), StepRecord()
    supply = new_supply(run, RunState())
    batch = supply.take(1, record, keep_all)
    record.ledger.book({"trained": batch.num_tokens - 1})
    with pytest.raises(LedgerError, match="the difference is 1"):
        supply.close_step(1, record)


def test_a_token_that_is_lost_while_the_batch_is_built_is_found_before_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was sampled is counted in what the engines returned."""
    build = scored_groups.build_rollout_batch

    def build_and_lose(*arguments: Any, **options: Any) -> Any:
        batch = build(*arguments, **options)
        batch.response_mask[1] = False
        return batch

    monkeypatch.setattr(scored_groups, "build_rollout_batch", build_and_lose)
    record = StepRecord()
    batch = new_supply(make_run(), RunState()).take(1, record, keep_all)
    with pytest.raises(LedgerError, match=r"must hold the 6 sampled tokens .*, it holds 5\."):
        record.ledger.require_in_batch(batch.num_tokens)


def test_the_next_step_draws_again_after_a_surplus() -> None:
    """Prompts beyond the batch come again in the next epoch; nothing stays open between two steps."""
    run = make_run(
        FILTER,
        "data.train_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "data.gen_batch_size=2",
    )
    drawn = []
    run.prompts.drawn = 5
    supply = new_supply(run, RunState())
    for step in (1, 2):
        record = StepRecord()
        drawn.append([row.row_index for row in supply.take(step, record, keep_all).prompts])
        record.ledger.book({"trained": 3})
        saved = supply.close_step(step, record)
        assert (saved.num_groups, saved.drawn) == (0, ())
        run.engines.version, run.engines.asleep = step, False
        supply._book.publish(step)
    assert drawn == [[5], [1]]  # 6 is a surplus; 7 and 0 tell nothing


def test_another_metric_filters_other_prompts() -> None:
    batch, metrics = sample(make_run(FILTER, "algorithm.filter_groups.metric=length"))
    assert [row.row_index for row in batch.prompts] == [0, 1]
    assert metrics["training/filter_groups/informative_ratio"] == 1


@pytest.mark.parametrize(
    ("metric", "informative"),
    [("score", [1, 3]), ("acc", [1, 3]), ("reward", [0, 1]), ("seq_reward", [0, 1])],
)
def test_a_score_is_filtered_before_the_overlong_penalty_and_a_reward_after_it(
    metric: str, informative: list[int]
) -> None:
    section = "reward.reward_kwargs.overlong_buffer_cfg"  # a penalty of 0.5 for every second sample
    penalty = (f"{section}.enable=True", f"{section}.len=2", "data.max_response_length=3")
    batch, _ = sample(make_run(FILTER, *penalty, f"algorithm.filter_groups.metric={metric}"))
    assert [row.row_index for row in batch.prompts] == informative


def test_too_few_informative_prompts_end_the_run_with_advice() -> None:
    run = make_run(
        FILTER, "algorithm.filter_groups.metric=constant", "algorithm.filter_groups.max_num_gen_batches=3"
    )
    with pytest.raises(
        ValueError, match=r"max_num_gen_batches=3 batches of 2 prompts gave 0\. .*raise the limit"
    ):
        sample(run)
    assert run.prompts.drawn <= 4 * 2


@pytest.mark.parametrize("metric", ["pred", "accuracy"])
def test_a_metric_that_the_reward_does_not_return_is_named(metric: str) -> None:
    with pytest.raises(
        ValueError, match=f"metric must name .* got '{metric}'; it returned the columns .*'acc'"
    ):
        sample(make_run(FILTER, f"algorithm.filter_groups.metric={metric}"))


def test_remax_asks_once_per_prompt_for_a_greedy_response() -> None:
    run = make_run("algorithm.adv_estimator=remax")
    batch, metrics = sample(run)
    assert run.engines.calls == [(4, 1.0), (2, 0.0)]
    assert metrics["ledger/baseline_tokens"] == 12
    assert batch.reward_baselines is not None
    assert batch.reward_baselines.tolist() == [GREEDY_SCORE] * 4


def test_gdpo_gets_its_columns() -> None:
    batch, metrics = sample(
        make_run("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[length,score]")
    )
    assert batch.component_scores is not None
    assert batch.component_scores.tolist() == [[1, 1], [2, 1], [1, 0], [2, 1]]
    assert metrics["gdpo/length/mean"] == 1.5


def test_the_overlong_penalty_is_part_of_the_score_and_of_nothing_else() -> None:
    section = "reward.reward_kwargs.overlong_buffer_cfg"
    run = make_run(
        f"{section}.enable=True",
        f"{section}.len=2",
        "data.max_response_length=3",
        f"{section}.log=True",
    )
    batch, _ = sample(run)
    assert batch.scores.tolist() == [1, 0.5, 0, 0.5]
    assert batch.extras["acc"] == [1, 1, 0, 1]
    assert batch.extras["overlong_reward"] == [0, -0.5, 0, -0.5]
    assert batch.extras["overlong"] == [False, True, False, True]


def test_the_overlong_penalty_weighs_its_factor_and_is_a_column_only_if_asked_for() -> None:
    section = "reward.reward_kwargs.overlong_buffer_cfg"
    limits = (f"{section}.enable=True", f"{section}.len=2", "data.max_response_length=3")
    batch, _ = sample(make_run(*limits, f"{section}.penalty_factor=0.5"))
    assert batch.scores.tolist() == [1, 0.75, 0, 0.75]
    assert "overlong_reward" not in batch.extras


def test_no_stop_token_is_scored_a_special_one_or_not() -> None:
    tokenizer, run, seen = build_tokenizer(1024), make_run(), list[str]()
    run.tokenizer, run.stop_token_ids = tokenizer, (tokenizer.eos_token_id, *tokenizer.encode("!"))

    def scored(rows: Any, texts: list[str]) -> list[RewardOutput]:
        seen.extend(texts)
        return [RewardOutput(1.0)] * len(texts)

    run.scorer = SimpleNamespace(score=scored)
    responses = [tokenizer.encode(text) for text in ("5<|im_end|>", "5!", "5", "5<|endoftext|>")]
    scores = scored_groups.score(run, [prompt(0)] * 4, responses, [()] * 4)
    assert scores.texts == seen == ["5"] * 4
