"""What a step trains on, with engines and a reward that are a table: refilling, trimming, greedy baselines, penalties."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_models import small_run_config

from verl_rc.checkpoint import RunState
from verl_rc.data.batches import Completions, Timed
from verl_rc.data.dataset import PromptRow
from verl_rc.data.samples import Samples
from verl_rc.driver.sample import sample_batch
from verl_rc.driver.services import Services
from verl_rc.driver.step_record import StepRecord
from verl_rc.ppo.ledger import LedgerError
from verl_rc.rewards import RewardOutput
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions

SCORES = {0: (1, 1), 1: (0, 1), 2: (0, 0), 3: (1, 0), 4: (1, 1), 5: (0, 1), 6: (0.5, 1), 7: (1, 1)}
"""The two samples' scores of each prompt: 1, 3, 5 and 6 tell something."""
GREEDY_SCORE = 7.0
FILTER = "algorithm.filter_groups.enable=True"


def prompt(row: int) -> PromptRow:
    """A prompt of 1 to 3 tokens that are its own number."""
    return PromptRow(row, [row] * (1 + row % 3), [], "table", None, {})


class Engines:
    """Sample k of a prompt is k + 1 tokens that are the prompt's number; a greedy response is six of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, float]] = []
        self.asleep = False

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions, on_loss: Any) -> Timed[Completions]:
        assert not self.asleep
        self.calls.append((len(requests), options.temperature))
        greedy = options.temperature == 0
        lengths = torch.tensor([6 if greedy else index % 2 + 1 for index in range(len(requests))])
        numbers = torch.tensor([request.prompt_token_ids[0] for request in requests])
        mask = torch.arange(7) < lengths[:, None]
        completions = Completions(
            responses=torch.where(mask, numbers[:, None], 0),
            response_lengths=lengths,
            rollout_log_probs=torch.zeros(mask.shape),
            policy_versions=torch.where(mask, 0, -1),
            finished=torch.ones(len(requests), dtype=torch.bool),
            batch_size=[len(requests)],
        )
        return Timed(completions, 0.5)

    def sleep(self) -> list[Any]:
        self.asleep = True
        return []


class Scorer:
    """Reads the sample's number from the length of its text."""

    def score(self, rows: Sequence[PromptRow], texts: Sequence[str]) -> list[RewardOutput]:
        outputs = []
        for row, text in zip(rows, texts, strict=True):
            score = GREEDY_SCORE if len(text) == 6 else SCORES[row.row_index][len(text) - 1]
            outputs.append(RewardOutput(float(score), {"acc": float(score), "length": len(text), "constant": 1.0}))
        return outputs


class Prompts:
    def __init__(self) -> None:
        self.drawn = 2

    def draw(self) -> tuple[int, list[PromptRow]]:
        rows = [prompt(row % 8) for row in range(self.drawn, self.drawn + 2)]
        self.drawn += 2
        return self.drawn // 8, rows


def make_run(*overrides: str) -> Any:
    def batch_decode(rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["x" * len(row) for row in rows]

    engines = Engines()
    return SimpleNamespace(
        config=small_run_config(Path("unused"), *overrides),
        tokenizer=SimpleNamespace(pad_token_id=99, batch_decode=batch_decode),
        stop_token_ids=(0,),
        prompts=Prompts(),
        scorer=Scorer(),
        engines=engines,
        agent_loop=None,
    )


def sample(run: Any) -> tuple[Samples, dict[str, float]]:
    record = StepRecord()
    batch = sample_batch(cast(Services, run), RunState(), [prompt(0), prompt(1)], epoch=0, record=record)
    assert run.engines.asleep
    return batch, record.metrics()


def test_without_a_filter_all_prompts_stay() -> None:
    batch, metrics = sample(make_run())
    assert [row.row_index for row in batch.prompts] == [0, 1]
    assert batch.scores.tolist() == [1, 1, 0, 1]
    assert batch.reward_baselines is batch.component_scores is None
    assert metrics["perf/rollout_tokens_per_second"] == 6 / 0.5
    assert not [name for name in metrics if name.startswith("training/filter_groups")]


def test_further_prompts_are_drawn_until_enough_tell_something() -> None:
    run = make_run(FILTER)
    batch, metrics = sample(run)
    assert [row.row_index for row in batch.prompts] == [1, 3]
    assert batch.rollouts.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.scores.tolist() == [0, 1, 1, 0]
    assert batch.extras["length"] == [1, 2, 1, 2]
    assert batch.rollouts.tokens.responses[:, 0].tolist() == [1, 1, 3, 3]
    assert batch.rollouts.tokens.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert run.prompts.drawn == 4
    counted = {name.rpartition("/")[2]: value for name, value in metrics.items() if "filter_groups" in name}
    assert counted == {
        "gen_batches": 2,
        "evicted_samples": 4,
        "discarded_surplus_samples": 0,
        "informative_ratio": 0.5,
        "sampled_score_mean": 4 / 8,
    }
    assert metrics["perf/rollout_tokens_per_second"] == 12 / 1.0


def test_what_is_left_over_is_dropped_and_counted() -> None:
    run = make_run(FILTER, "data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1", "data.gen_batch_size=2")
    run.prompts.drawn = 4
    record = StepRecord()
    batch = sample_batch(cast(Services, run), RunState(), [prompt(5), prompt(6)], epoch=0, record=record)
    assert [row.row_index for row in batch.prompts] == [5]
    assert record.metrics()["training/filter_groups/discarded_surplus_samples"] == 2
    with pytest.raises(LedgerError, match="of the step's 6 sampled tokens"):  # the batch of 3 is not trained on yet
        record.ledger.close()
    record.ledger.book({"trained": batch.num_tokens})
    books = record.ledger.close()
    assert [books[f"ledger/{name}_tokens"] for name in ("trained", "filtered", "surplus")] == [3, 0, 3]
    assert [books[f"ledger/prompts_{name}"] for name in ("in_batch", "filtered", "surplus")] == [1, 0, 1]


def test_another_metric_filters_other_prompts() -> None:
    batch, metrics = sample(make_run(FILTER, "algorithm.filter_groups.metric=length"))
    assert [row.row_index for row in batch.prompts] == [0, 1]
    assert metrics["training/filter_groups/informative_ratio"] == 1


@pytest.mark.parametrize(
    ("metric", "informative"), [("score", [1, 3]), ("acc", [1, 3]), ("reward", [0, 1]), ("seq_reward", [0, 1])]
)
def test_a_score_is_filtered_before_the_overlong_penalty_and_a_reward_after_it(metric: str, informative: list[int]) -> None:
    section = "reward.reward_kwargs.overlong_buffer_cfg"  # a penalty of 0.5 for every second sample
    penalty = (f"{section}.enable=True", f"{section}.len=2", "reward.reward_kwargs.max_resp_len=3")
    batch, _ = sample(make_run(FILTER, *penalty, f"algorithm.filter_groups.metric={metric}"))
    assert [row.row_index for row in batch.prompts] == informative


def test_too_few_informative_prompts_end_the_run_with_advice() -> None:
    run = make_run(FILTER, "algorithm.filter_groups.metric=constant", "algorithm.filter_groups.max_num_gen_batches=3")
    with pytest.raises(ValueError, match=r"max_num_gen_batches=3 batches of 2 prompts gave 0\. .*raise the limit"):
        sample(run)
    assert len(run.engines.calls) == 3


@pytest.mark.parametrize("metric", ["pred", "accuracy"])
def test_a_metric_that_the_reward_does_not_return_is_named(metric: str) -> None:
    with pytest.raises(ValueError, match=f"metric must name .* got '{metric}'; it returned the columns .*'acc'"):
        sample(make_run(FILTER, f"algorithm.filter_groups.metric={metric}"))


def test_remax_asks_once_per_prompt_for_a_greedy_response() -> None:
    run = make_run("algorithm.adv_estimator=remax")
    batch, metrics = sample(run)
    assert run.engines.calls == [(4, 1.0), (2, 0.0)]
    assert batch.reward_baselines is not None
    assert batch.reward_baselines.tolist() == [GREEDY_SCORE] * 4
    assert metrics["critic/reward_baselines/mean"] == GREEDY_SCORE
    assert "timing_s/gen_max" in metrics


def test_gdpo_gets_its_columns() -> None:
    batch, metrics = sample(make_run("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[length,score]"))
    assert batch.component_scores is not None
    assert batch.component_scores.tolist() == [[1, 1], [2, 1], [1, 0], [2, 1]]
    assert metrics["gdpo/length/mean"] == 1.5


def test_the_overlong_penalty_is_part_of_the_score_and_of_nothing_else() -> None:
    section = "reward.reward_kwargs.overlong_buffer_cfg"
    run = make_run(f"{section}.enable=True", f"{section}.len=2", "reward.reward_kwargs.max_resp_len=3", f"{section}.log=True")
    batch, metrics = sample(run)
    assert batch.scores.tolist() == [1, 0.5, 0, 0.5]
    assert batch.extras["acc"] == [1, 1, 0, 1]
    assert batch.extras["overlong_reward"] == [0, -0.5, 0, -0.5]
    assert batch.extras["overlong"] == [False, True, False, True]
    assert metrics["response_length/overlong_ratio"] == 0.5
    assert metrics["critic/overlong_reward/min"] == -0.5


def test_the_overlong_penalty_weighs_its_factor_and_is_a_column_only_if_asked_for() -> None:
    section = "reward.reward_kwargs.overlong_buffer_cfg"
    limits = (f"{section}.enable=True", f"{section}.len=2", "reward.reward_kwargs.max_resp_len=3")
    batch, _ = sample(make_run(*limits, f"{section}.penalty_factor=0.5"))
    assert batch.scores.tolist() == [1, 0.75, 0, 0.75]
    assert "overlong_reward" not in batch.extras
