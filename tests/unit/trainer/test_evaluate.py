"""The validation pass with scripted engines: what is asked, what is reported, shown and stored."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from batches_of_ones import ones_rollouts
from made_samples import sample

from verl_rc.algorithm.rewards import RewardOutput
from verl_rc.config.rollout import ValKwargsConfig
from verl_rc.metrics import check_names
from verl_rc.records.dataset import PromptRow
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.runtime.checkpoint import RunState
from verl_rc.trainer.evaluate import validate, validation_metrics
from verl_rc.trainer.step_record import StepRecord
from verl_rc.trainer.weights import Publisher


def prompt_row(index, source="digits"):
    return PromptRow(
        index, [10 + index, 7], [{"role": "user", "content": f"question {index}"}], source, "6", {}
    )


class ScriptedEngines:
    """Answers prompt token p, sample s with the token ``100 + 10 * (p - 10) + s``; remembers every call."""

    def __init__(self):
        self.calls = []
        self.version = 0
        self._drawn = {}

    def generate(self, requests, options, replace_lost):
        self.calls.append((list(requests), options))
        tokens = []
        for request in requests:
            first = request.prompt_token_ids[0]
            drawn = self._drawn[first] = self._drawn.get(first, -1) + 1
            tokens.append([100 + 10 * (first - 10) + drawn])
        return [sample(row, given, self.version) for row, given in enumerate(tokens)]


class Tables:
    def __init__(self):
        self.tables = []

    def log_table(self, name, columns, rows, step):
        self.tables.append((name, columns, rows, step))


def even_is_right(text):
    return RewardOutput(float(text) / 100, {"acc": float(int(text) % 2 == 0), "pred": str(int(text) % 2)})


def scripted_run(samples, prompts=3, **changes):
    trainer = {"seed": 1, "log_val_generations": 0, "validation_data_dir": None}
    data = {"max_response_length": 4, "val_batch_size": None}
    sections = [
        {name: changes.pop(name, default) for name, default in section.items()} for section in (trainer, data)
    ]
    val_kwargs = ValKwargsConfig(n=samples, do_sample=samples > 1, temperature=1.0 if samples > 1 else 0.0)
    assert not changes
    return SimpleNamespace(
        config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(
                rollout=SimpleNamespace(
                    val_kwargs=val_kwargs, converses=False, environment=SimpleNamespace(name=None)
                )
            ),
            trainer=SimpleNamespace(**sections[0]),
            data=SimpleNamespace(**sections[1]),
        ),
        validation_rows=[prompt_row(index) for index in range(prompts)],
        engines=ScriptedEngines(),
        tokenizer=SimpleNamespace(
            pad_token_id=0, batch_decode=lambda rows, skip_special_tokens: [str(row[0]) for row in rows]
        ),
        scorer=SimpleNamespace(score=lambda rows, texts: [even_is_right(text) for text in texts]),
        tracker=Tables(),
        stop_token_ids=(2,),
    )


def metrics_of(run, step=0):
    record = StepRecord()
    run.engines.version = step
    accuracy = validate(run, Publisher(run, RunState()), record, step)
    return accuracy, {name: value for name, value in record.metrics().items() if name.startswith("val-")}


def test_one_greedy_sample_per_prompt():
    run = scripted_run(samples=1)
    accuracy, metrics = metrics_of(run)
    assert accuracy == 1.0  # 100, 110, 120
    assert metrics == pytest.approx({"val-core/digits/acc/mean@1": 1.0, "val-aux/digits/reward/mean@1": 1.1})
    ((_, options),) = run.engines.calls
    assert options.temperature == 0.0


def test_engines_with_another_version_are_found():
    run = scripted_run(samples=1)
    run.engines.version = 3
    with pytest.raises(RuntimeError, match="must come from weight version 4"):
        validate(run, Publisher(run, RunState()), StepRecord(), step=4)


def test_every_prompt_is_sampled_n_times_each_with_its_own_seed():
    run = scripted_run(samples=3)
    accuracy, metrics = metrics_of(run)
    ((requests, options),) = run.engines.calls
    assert [request.prompt_token_ids[0] for request in requests] == [10, 10, 10, 11, 11, 11, 12, 12, 12]
    assert len({request.seed for request in requests}) == 9
    assert options.temperature == 1.0
    assert accuracy == pytest.approx(2 / 3)
    assert metrics["val-core/digits/acc/mean@3"] == pytest.approx(2 / 3)
    assert metrics["val-core/digits/acc/best@3/mean"] == pytest.approx(26 / 27)
    assert metrics["val-core/digits/acc/maj@3/mean"] == pytest.approx(20 / 27)
    assert metrics["val-aux/digits/acc/worst@2/mean"] == pytest.approx(4 / 9)
    assert metrics["val-aux/digits/acc/best@3/std"] == pytest.approx(math.sqrt(26) / 27)


def test_the_seeds_are_the_same_at_every_step_and_in_every_batch():
    whole, parts = scripted_run(samples=2), scripted_run(samples=2, val_batch_size=2)
    metrics_of(whole, step=0)
    metrics_of(whole, step=5)
    metrics_of(parts)
    first, second = ([request.seed for request in requests] for requests, _ in whole.engines.calls)
    assert first == second
    assert [len(requests) for requests, _ in parts.engines.calls] == [
        4,
        2,
    ]  # two prompts with their two samples, then one
    assert [request.seed for requests, _ in parts.engines.calls for request in requests] == first


def test_batches_do_not_change_the_result():
    assert metrics_of(scripted_run(samples=3, val_batch_size=2)) == metrics_of(scripted_run(samples=3))


def test_samples_of_a_prompt_are_shown_together():
    run = scripted_run(samples=3, prompts=4, log_val_generations=5)
    metrics_of(run, step=7)
    ((name, columns, table, step),) = run.tracker.tables
    assert (name, columns, step) == ("val/generations", ["input", "output", "ground_truth", "score"], 7)
    assert len(table) == 5
    questions = [row[0] for row in table]
    assert questions[:3] == [questions[0]] * 3
    assert questions[3:] == [questions[3]] * 2
    assert questions[0] != questions[3]
    first = 100 + 10 * int(questions[0].removeprefix("question "))
    assert [row[1] for row in table[:3]] == [str(first), str(first + 1), str(first + 2)]
    assert table[0][2:] == ["6", pytest.approx(first / 100)]


@pytest.mark.parametrize(("shown", "rows"), [(0, None), (3, 3), (100, 8)])
def test_as_many_samples_are_shown_as_there_are(shown, rows):
    run = scripted_run(samples=2, prompts=4, log_val_generations=shown)
    metrics_of(run)
    assert [len(table) for _, _, table, _ in run.tracker.tables] == ([] if rows is None else [rows])


def test_all_samples_are_stored(tmp_path):
    metrics_of(scripted_run(samples=3, validation_data_dir=str(tmp_path / "validation")), step=4)
    samples = [json.loads(line) for line in (tmp_path / "validation/4.jsonl").read_text().splitlines()]
    assert [sample["output"] for sample in samples] == [
        str(100 + 10 * p + s) for p in range(3) for s in range(3)
    ]
    assert samples[4]["input"] == [{"role": "user", "content": "question 1"}]
    assert samples[4]["acc"] == 0.0
    assert samples[4]["pred"] == "1"


def statistics_of(rows, scores, samples, **extras):
    lengths = torch.ones(len(rows), dtype=torch.int64)
    rollouts = ones_rollouts(torch.zeros(len(rows), 1), lengths, group=1)
    texts = [""] * len(rows)
    metrics = validation_metrics(
        ScoredBatch(rollouts, torch.tensor(scores), prompts=rows, texts=texts, extras=extras), samples
    )
    check_names(metrics)
    return metrics


def test_without_accuracy_the_reward_makes_the_headline():
    metrics = statistics_of([prompt_row(0), prompt_row(0)], [0.0, 1.0], 2)
    assert {name: value for name, value in metrics.items() if name.startswith("val-core/")} == {
        "val-core/digits/reward/mean@2": 0.5,
        "val-core/digits/reward/best@2/mean": 0.75,
    }
    assert metrics["val-aux/digits/reward/worst@2/mean"] == 0.25
    assert metrics["val-aux/digits/reward/best@2/std"] == pytest.approx(math.sqrt(3) / 4)


def test_every_data_source_has_its_own_headline():
    rows = [prompt_row(0, "a/b"), prompt_row(1, "c"), prompt_row(2, "a/b")]
    metrics = statistics_of(rows, [1.0, 2.0, 0.0], 1, acc=[1.0, None, 0.0])
    assert metrics == {
        "val-core/a/b/acc/mean@1": 0.5,
        "val-aux/a/b/reward/mean@1": 0.5,
        "val-core/c/reward/mean@1": 2.0,
    }


def test_numeric_columns_are_averaged_over_the_samples_that_have_them():
    rows = [prompt_row(0), prompt_row(1), prompt_row(2)]
    metrics = statistics_of(
        rows,
        [1.0, 1.0, 1.0],
        1,
        length=[4, None, 8],
        ratio=[math.nan, 0.5, math.inf],
        note=["long", "1.0", None],
        empty=[None, math.nan, None],
        pred=["6", None, "7"],
    )
    assert metrics == {
        "val-core/digits/reward/mean@1": 1.0,
        "val-aux/digits/length/mean@1": 6.0,
        "val-aux/digits/ratio/mean@1": 0.5,
    }


def test_rows_of_a_prompt_need_not_be_adjacent():
    # By prompt the samples are 1, 1 and 0, 0; neighbours would be 1, 0 and 0, 1.
    rows = [prompt_row(0), prompt_row(1), prompt_row(1), prompt_row(0)]
    metrics = statistics_of(rows, [1.0, 0.0, 0.0, 1.0], 2)
    assert metrics["val-core/digits/reward/best@2/mean"] == 0.5
    assert metrics["val-aux/digits/reward/worst@2/mean"] == 0.5
    assert metrics["val-aux/digits/reward/std@2"] == 0.0
