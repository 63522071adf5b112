"""AReaL's hook on a module with the names and signatures of AReaL 1.0.4."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from stand_in_trainers import imported, install

from verl_rc.insight.hooks import areal as hook
from verl_rc.insight.run_folder import token_source

MODULE, WORKER = "areal.trainer.ppo.actor", "areal.infra.rpc.rpc_server"
TEXT = """
class PPOActor:
    def _compute_advantages(self, data):
        # As AReaL does: what it reads is moved to the place before, in the same mapping.
        data["loss_mask"] = data["loss_mask"].float().roll(-1, 1)
        data["logprobs"] = data["logprobs"].roll(-1, 1) * data["loss_mask"]
        data["rewards"] *= 10
        data["advantages"] = data["loss_mask"] * 0.5
        return data
"""


def batch() -> dict[str, torch.Tensor]:
    """One row of prompt 1 2 and tokens 3 (tool) 4, and one of prompt 5 and token 6."""
    return {
        "input_ids": torch.tensor([[1, 2, 3, 7, 4], [5, 6, 0, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        "loss_mask": torch.tensor([[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]),
        "logprobs": torch.tensor([[0.0, 0.0, -0.1, 0.0, -0.2], [0.0, -0.3, 0.0, 0.0, 0.0]]),
        "prox_logp": torch.tensor([[-9.0, -0.6, -9.0, -0.7, -9.0], [-0.8, -9.0, -9.0, -9.0, -9.0]]),
        "versions": torch.tensor([[-1, -1, 2, -1, 3], [-1, 3, -1, -1, -1]]),
        "rewards": torch.tensor([1.0, 0.0]),
    }


def trained(module: ModuleType, is_head: bool = True) -> None:
    actor = module.PPOActor()
    actor.temperature = 0.9
    actor.engine = SimpleNamespace(get_version=lambda: 3, is_data_parallel_head=lambda: is_head)
    data = batch()
    assert actor._compute_advantages(data) is data


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    install(monkeypatch, tmp_path / "site", "areal", "1.0.4", {MODULE: TEXT})
    monkeypatch.setenv("VERL_RC_TOKENS", str(tmp_path / "tokens"))
    monkeypatch.setenv("RANK", "1")
    importlib.reload(hook)
    return imported(monkeypatch, MODULE)


def test_a_step(module: ModuleType, tmp_path: Path) -> None:
    trained(module)
    assert [file.name for file in (tmp_path / "tokens").glob("step_*")] == ["step_000004.rank_1.jsonl"]
    source = token_source(tmp_path / "tokens")
    assert source is not None
    record = source.read(4)
    assert record.facts["trainer"] == "AReaL"
    assert record.facts["temperature"] == 0.9
    assert record.lengths.tolist() == [3, 1]
    assert record.tokens["response_ids"].tolist() == [3, 7, 4, 6]
    assert record.tokens["response_mask"].tolist() == [True, False, True, True]
    sampled = record.tokens["response_mask"]
    assert record.tokens["rollout_log_prob"][sampled] == pytest.approx([-0.1, -0.2, -0.3])
    assert record.tokens["old_log_prob"][sampled] == pytest.approx([-0.6, -0.7, -0.8])
    assert record.tokens["advantage"][sampled].tolist() == [0.5, 0.5, 0.5]
    assert record.tokens["version"][sampled].tolist() == [2, 3, 3]
    assert record.rows["score"].tolist() == [1.0, 0.0]
    assert record.prompts is not None
    assert [ids.tolist() for ids in record.prompts] == [[1, 2], [5]]


def test_one_rank_of_those_with_the_same_rows_writes(module: ModuleType, tmp_path: Path) -> None:
    trained(module, is_head=False)
    assert not (tmp_path / "tokens").exists()


def test_another_version_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, tmp_path / "site", "areal", "1.1.0", {MODULE: TEXT})
    monkeypatch.setenv("VERL_RC_TOKENS", str(tmp_path / "tokens"))
    importlib.reload(hook)
    trained(imported(monkeypatch, MODULE))
    assert "its hook knows areal from 1.0.4 to below 1.0.5, and 1.1.0 is installed" in caplog.text
    assert not (tmp_path / "tokens").exists()


def test_it_is_areal_s_own_worker_with_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prints = "print(sys.argv[1:], PPOActor._compute_advantages.__wrapped__)"
    worker = f"import sys\nfrom {MODULE} import PPOActor\n{prints}"
    install(monkeypatch, tmp_path, "areal", "1.0.4", {MODULE: TEXT, WORKER: worker})
    environment = {**os.environ, "VERL_RC_TOKENS": str(tmp_path / "tokens")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "verl_rc.insight.hooks.areal", "--port", "7"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("['--port', '7'] <function PPOActor._compute_advantages")
