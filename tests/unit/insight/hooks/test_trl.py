"""TRL with the hook, for real: what is recorded is right, and no number of the run changes. Runs where TRL
1.16 is installed."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl")
import torch
import trl_runs
from make_tiny_model import build_model, build_tokenizer, parse_arguments

from verl_rc.insight.hooks import recorder
from verl_rc.insight.hooks.trl import VERSIONS, record_tokens
from verl_rc.insight.run_folder import read_run
from verl_rc.insight.run_folder.token_files import token_source
from verl_rc.records.token_records.token_record import TokenRecord

SMALL = {"max_completion_length": 6, "per_device_train_batch_size": 16, "num_generations": 4}
STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    options = parse_arguments(["--output_dir", str(folder), "--num_layers", "2", "--hidden_size", "64"])
    tokenizer = build_tokenizer(options.max_length)
    network = build_model(options, tokenizer)
    with torch.no_grad():
        network.lm_head.weight.mul_(8)  # entropies that differ
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that differ within groups: an untrained model has none otherwise."""
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.fixture(autouse=True)
def _spread_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_runs, "reward", spread)


def outcome(trainer: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What was logged but for times, and the weights."""
    lines = [
        {name: value for name, value in line.items() if "time" not in name and "per_second" not in name}
        for line in trainer.state.log_history
    ]
    return lines, trainer.model.state_dict()


def records_of(folder: Path) -> list[TokenRecord]:
    source = token_source(folder)
    assert source is not None
    assert source.trainer == "TRL"
    return list(source.records())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 8, "beta": 0.1},
        {"off_policy_mask_threshold": 1e-9},
    ],
    ids=["one update", "reused", "off-policy mask"],
)
def test_no_number_of_the_run_changes(model: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    arguments, steps = {**SMALL, **settings}, 4 if "beta" in settings else STEPS
    plain = trl_runs.train(model, tmp_path / "plain", "healthy", steps, recorded=False, **arguments)
    recorded = trl_runs.train(model, tmp_path / "recorded", "healthy", steps, **arguments)
    (lines, weights), (ours, our_weights) = outcome(plain), outcome(recorded)
    assert ours == lines
    assert lines[0]["grad_norm"] != 0
    assert all(torch.equal(our_weights[name], values) for name, values in weights.items())
    records = records_of(tmp_path / "recorded")
    # Each generated row is recorded once, before its first update.
    assert sum(len(record.lengths) for record in records) == (16 if "beta" in settings else 16 * STEPS)
    for record in records:
        logs = record.log_ratio()
        assert logs is not None
        assert np.abs(logs).max() < 1e-4
        assert {"entropy", "sum_pi_squared", "advantage", "version"} <= record.tokens.keys()
        assert ("ref_log_prob" in record.tokens) == ("beta" in settings)


def log_softmax(network: Any, record: TokenRecord, row: int) -> torch.Tensor:
    """Of the distribution of each response token, float64 ``[R, V]``."""
    assert record.prompts is not None
    prompt, response = record.prompts[row], record.tokens["response_ids"][record.span(row)]
    with torch.no_grad():
        logits = network(torch.tensor([[*prompt.tolist(), *response.tolist()]])).logits
    return logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)


def test_the_records_are_those_of_the_model(model: str, tmp_path: Path) -> None:
    trl_runs.train(model, tmp_path, "healthy", 1, scale_rewards="none", **SMALL)
    (record,) = records_of(tmp_path)
    network = trl_runs.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert record.prompts is not None
    for row in range(len(record.prompts)):
        place = record.span(row)
        response, logs = record.tokens["response_ids"][place], log_softmax(network, record, row)
        expected = {
            "old_log_prob": logs[range(len(response)), response.tolist()],
            "rollout_log_prob": logs[range(len(response)), response.tolist()],
            "entropy": -(logs.exp() * logs).sum(-1),
            "sum_pi_squared": (2 * logs).exp().sum(-1),
        }
        for name, values in expected.items():
            assert record.tokens[name][place] == pytest.approx(values.numpy(), abs=2e-5), name
    assert record.facts["temperature"] == 1.0
    assert set(record.rows["group"].tolist()) == {0, 1, 2, 3}
    for row, (prompt, advantage) in enumerate(
        zip(record.prompts, record.tokens["advantage"][record.starts], strict=True)
    ):
        same = [n for n, other in enumerate(record.prompts) if np.array_equal(other, prompt)]
        assert advantage == pytest.approx(
            record.rows["score"][row] - record.rows["score"][same].mean(), abs=1e-5
        )


TALK = (
    "{% for one in messages %}{{ one.content }}{% for call in one.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token if one.role == 'assistant' }}{% endfor %}"
    "{{ '=' if add_generation_prompt }}"
)


def weather() -> str:
    """Say how the weather is."""
    return "sunny"


def call_once(tokenizer: Any, ids: list[int], prefix: list[int], **_: Any) -> dict[str, Any]:
    """Of what the policy said a call of the tool; nothing once the tool has answered."""
    said = {"role": "assistant", "content": tokenizer.decode(ids)}
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
    return said if "sunny" in tokenizer.decode(prefix) else {**said, "tool_calls": calls}


def test_two_turns_with_the_answer_of_a_tool_between_them(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.parse_response", call_once)
    trl_runs.set_seed(0)
    tokenizer = trl_runs.AutoTokenizer.from_pretrained(model, padding_side="left", chat_template=TALK)
    tokenizer.response_template = {"stands": "there"}
    network = trl_runs.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stops = [*range(0, 250, 3), tokenizer.eos_token_id]  # a turn is a few tokens long
    network.generation_config.eos_token_id = stops
    settings = {**SMALL, "max_completion_length": 40, "max_steps": 1, "output_dir": str(tmp_path)}
    plain = {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no"}
    prompts = [{"prompt": [{"role": "user", "content": f"{number}"}]} for number in range(100, 116)]
    trainer = trl_runs.GRPOTrainer(
        network,
        spread,
        trl_runs.GRPOConfig(**settings, **plain),
        trl_runs.Dataset.from_list(prompts),
        processing_class=tokenizer,
        tools=[weather],
    )
    record_tokens(trainer)
    trainer.train()
    (record,) = records_of(tmp_path)
    network = trl_runs.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answer = tokenizer("sunny=")["input_ids"]
    for row in range(16):
        place = record.span(row)
        ids, sampled = record.tokens["response_ids"][place], record.tokens["response_mask"][place]
        assert ids[~sampled].tolist() == answer
        changes = np.flatnonzero(np.diff(sampled.astype(int)))
        assert len(changes) == 2  # it begins and ends with a turn of the policy
        assert ids[changes[0]] in stops
        assert bool(record.rows["finished"][row]) == (ids[-1] in stops)
        logs = log_softmax(network, record, row)[range(len(ids)), ids.tolist()].numpy()
        for name in ("rollout_log_prob", "old_log_prob"):
            assert record.tokens[name][place][sampled] == pytest.approx(logs[sampled], abs=2e-5), name


def test_a_cooler_engine_shows_its_slope(model: str, tmp_path: Path) -> None:
    trl_runs.train(model, tmp_path, "temperature", STEPS, **SMALL)
    records = records_of(tmp_path)
    logs = np.concatenate([record.log_ratio() for record in records])
    surprise = np.concatenate([r.tokens["old_log_prob"] + r.tokens["entropy"] for r in records])
    assert np.polyfit(surprise, logs, 1)[0] == pytest.approx(1 - 1 / 0.9, abs=0.01)


def test_the_report_reads_metrics_and_tokens(model: str, tmp_path: Path) -> None:
    trl_runs.train(model, tmp_path, "healthy", STEPS, **SMALL)
    run = read_run(tmp_path)
    assert run.tokens is not None
    assert run.tokens.steps == [1, 2]
    assert run.has("critic/score/mean")
    assert run.has("sync/rollout_gap_mean")


def test_another_version_leaves_the_trainer_alone(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder.metadata, "version", lambda _: VERSIONS[1])
    trl_runs.train(model, tmp_path, "healthy", 1, **SMALL)
    assert not (tmp_path / "tokens").exists()
    assert "records no tokens of TRL" in caplog.text


def test_a_full_disk_does_not_end_the_run(model: str, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("no folder")
    trainer = trl_runs.train(model, tmp_path, "healthy", STEPS, **SMALL)
    assert trainer.state.global_step == STEPS


@pytest.mark.parametrize(("last", "steps"), [(1, []), (3, [1])])
def test_ctrl_c_keeps_whole_steps_alone(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, steps: list[int]
) -> None:
    """After the first of a step's two micro-batches."""
    stock, calls = recorder.Recorder.write, itertools.count(1)

    def write(records: Any, step: int, rows: Any) -> None:
        stock(records, step, rows)
        if next(calls) == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(recorder.Recorder, "write", write)
    settings = {**SMALL, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        trl_runs.train(model, tmp_path, "healthy", STEPS, **settings)
    source = token_source(tmp_path)
    assert ([] if source is None else source.steps) == steps


def test_a_folder_of_ones_own(model: str, tmp_path: Path) -> None:
    def plant(trainer: Any) -> None:
        record_tokens(trainer, tmp_path / "elsewhere")

    trl_runs.FAULTS["elsewhere"] = ({}, plant)
    trl_runs.train(model, tmp_path / "run", "elsewhere", 1, recorded=False, **SMALL)
    assert len(records_of(tmp_path / "elsewhere")) == 1
