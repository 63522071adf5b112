"""verl's hook on a module with the names and signatures of verl 0.9.1."""

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from stand_in_trainers import imported, install

from verl_rc.insight.hooks import verl as hook
from verl_rc.insight.run_folder.token_files import token_source

MODULE = "verl.trainer.ppo.v1.trainer_base"
TEXT = """
class Queue:
    def kv_batch_get(self, keys, partition_id, select_fields=None):
        assert partition_id == "train"
        return {name: values for name, values in self.fields.items() if name in select_fields}

tq = Queue()

class PPOTrainer:
    def _compute_advantage(self, batch, metrics):
        metrics["seen"] = True
        tq.fields["advantages"] = tq.computed
        return "result"
"""
ROWS = [
    {"key": "a_b_0_0", "prompts": [1, 2], "responses": [3, 4, 5], "loss_mask": [1, 0, 1]},
    {"key": "a_b_1_0", "prompts": [1, 2], "responses": [6], "loss_mask": [1]},
    {"key": "c_0_0", "prompts": [9], "responses": [7, 8], "loss_mask": [1, 1]},
]
"""The last row is padding."""


def jagged(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def fields() -> dict[str, torch.Tensor]:
    lengths = [len(row["responses"]) for row in ROWS]

    def filled(value: float) -> torch.Tensor:
        return jagged([[value - 0.1 * n for n in range(length)] for length in lengths])

    named = {name: jagged([row[name] for row in ROWS]) for name in ("prompts", "responses", "loss_mask")}
    return named | {
        "response_mask": jagged([[0, 0, 0], [1], [1, 1]]),  # rollout correction rejected the first row
        "rollout_log_probs": filled(-0.5),
        "old_log_probs": filled(-0.6),
        "entropy": filled(1.5),
        "rm_scores": jagged([[0.0, 0.0, 2.0], [1.0], [0.0, 0.0]]),
    }


class Run:
    """A step of the stand-in, under the hook."""

    def __init__(self, module: ModuleType, parts: int = 1, **algorithm: Any) -> None:
        rollout = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "dtype": "bfloat16", "logprobs_mode": "raw"}
        module.tq.fields = fields()
        module.tq.computed = jagged([[1.0] * 3, [-1.0], [0.0] * 2])
        self.trainer = module.PPOTrainer()
        self.trainer.global_steps = 7
        self.trainer.parameter_sync_step, self.trainer.local_trigger_step = parts, 0
        self.trainer.config = OmegaConf.create(
            {"actor_rollout_ref": {"rollout": rollout}, "algorithm": algorithm}
        )
        self.batch = SimpleNamespace(
            keys=[row["key"] for row in ROWS],
            partition_id="train",
            tags=[{"min_global_steps": 5}, {"min_global_steps": 6}, {"is_padding": True}],
        )
        self.metrics: dict[str, Any] = {}
        self.result = self.trainer._compute_advantage(self.batch, self.metrics)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in, imported after the plugin as ``import verl`` does it."""
    install(monkeypatch, tmp_path / "site", "verl", "0.9.1", {MODULE: TEXT})
    monkeypatch.setenv("VERL_RC_TOKENS", str(tmp_path / "tokens"))
    importlib.reload(hook)
    assert MODULE not in sys.modules  # patched lazily
    return imported(monkeypatch, MODULE)


def test_a_step(module: ModuleType, tmp_path: Path) -> None:
    run = Run(module)
    assert (run.result, run.metrics) == ("result", {"seen": True})
    source = token_source(tmp_path / "tokens")
    assert source is not None
    assert source.trainer == "verl"
    record = source.read(7)
    assert record.facts["temperature"] == 0.7
    assert record.facts["logprobs_mode"] == "raw"
    assert record.facts["engine_dtype"] == "bfloat16"
    assert record.lengths.tolist() == [3, 1]
    assert record.tokens["response_mask"].tolist() == [True, False, True, True]
    assert record.tokens["kept"].tolist() == [False, False, False, True]
    assert record.tokens["response_ids"].tolist() == [3, 4, 5, 6]
    assert record.tokens["rollout_log_prob"] == pytest.approx([-0.5, -0.6, -0.7, -0.5])
    assert record.tokens["old_log_prob"] == pytest.approx([-0.6, -0.7, -0.8, -0.6])
    assert record.tokens["advantage"].tolist() == [1.0, 1.0, 1.0, -1.0]
    assert record.tokens["version"].tolist() == [5, 5, 5, 6]
    assert record.rows["score"].tolist() == [2.0, 1.0]
    assert record.rows["group"][0] == record.rows["group"][1]
    assert record.prompts is not None
    assert [ids.tolist() for ids in record.prompts] == [[1, 2], [1, 2]]


def test_a_step_of_two_parts(module: ModuleType, tmp_path: Path) -> None:
    run = Run(module, parts=2)
    assert token_source(tmp_path / "tokens") is None  # half a step is no record of it
    run.trainer.local_trigger_step = 1
    run.trainer._compute_advantage(run.batch, {})
    source = token_source(tmp_path / "tokens")
    assert source is not None
    assert source.read(7).lengths.tolist() == [3, 1, 3, 1]


def test_bypass_mode_has_no_log_probs_of_the_trainer(module: ModuleType, tmp_path: Path) -> None:
    Run(module, rollout_correction={"bypass_mode": True})
    source = token_source(tmp_path / "tokens")
    assert source is not None
    assert "old_log_prob" not in source.read(7).tokens


def test_log_probs_of_the_engine_must_be_asked_for(
    module: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {name: values for name, values in fields().items() if name != "rollout_log_probs"}
    monkeypatch.setitem(globals(), "fields", lambda: dict(without))
    assert Run(module).result == "result"
    assert "actor_rollout_ref.rollout.calculate_log_probs=True must be set" in caplog.text
    assert list((tmp_path / "tokens").iterdir()) == []


@pytest.mark.parametrize(
    ("version", "text"),
    [("0.9.2", TEXT), ("0.9.1", TEXT.replace("batch, metrics", "metrics, batch")), ("0.9.1", "")],
)
def test_another_verl_is_left_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    text: str,
) -> None:
    install(monkeypatch, tmp_path / "site", "verl", version, {MODULE: text})
    monkeypatch.setenv("VERL_RC_TOKENS", str(tmp_path / "tokens"))
    importlib.reload(hook)
    module = imported(monkeypatch, MODULE)
    assert caplog.text.count("verl_rc records no tokens of verl:") == 1
    assert not hasattr(
        getattr(getattr(module, "PPOTrainer", None), "_compute_advantage", None), "__wrapped__"
    )


def test_without_the_variable_nothing_is_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path / "site", "verl", "0.9.1", {MODULE: TEXT})
    monkeypatch.delenv("VERL_RC_TOKENS", raising=False)
    importlib.reload(hook)
    assert not hasattr(imported(monkeypatch, MODULE).PPOTrainer._compute_advantage, "__wrapped__")


def test_verl_finds_it_in_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["verl.plugins"] == {"verl_rc": hook.__name__}
