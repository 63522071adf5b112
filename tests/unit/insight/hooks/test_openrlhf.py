"""OpenRLHF's hook on a module with the names and signatures of OpenRLHF 0.11."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in_trainers import imported, install

from verl_rc.insight.hooks import openrlhf as hook
from verl_rc.insight.run_folder import token_source

MODULE = "openrlhf.trainer.ppo_trainer"
TEXT = """
class BasePPOTrainer:
    def train_step(self, rollout_samples, global_step):
        return self.experience_maker.make_experience_batch(rollout_samples), global_step + 1

class PPOTrainer(BasePPOTrainer):
    pass
"""


def experiences(rollout_log_probs: bool = True) -> list[SimpleNamespace]:
    """One row of prompt 1 2 and tokens 3 (tool) 4, and one of prompt 5 and token 6, padded at the right."""
    mu = torch.tensor([[0.0, -0.1, 0.0, -0.2], [-0.3, 0.0, 0.0, 0.0]])
    return [
        SimpleNamespace(
            sequences=torch.tensor([[1, 2, 3, 7, 4], [5, 6, 0, 0, 0]]),
            attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
            action_mask=torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]),
            rollout_log_probs=mu if rollout_log_probs else None,
            action_log_probs=mu - 0.5 * (mu != 0),
            base_action_log_probs=None,
            values=None,
            advantages=torch.tensor([[0.0, 1.0, 0.0, 1.0], [-1.0, 0.0, 0.0, 0.0]]),
            rewards=torch.tensor([1.0, 0.0]),
            truncated=torch.tensor([False, True]),
        )
    ]


class Maker:
    def make_experience_batch(self, rollout_samples: Any) -> Any:
        return rollout_samples


def trainer_of(module: ModuleType) -> Any:
    trainer = module.PPOTrainer()
    trainer.experience_maker = Maker()
    trainer.args = SimpleNamespace(rollout=SimpleNamespace(temperature=0.8, top_p=0.95))
    return trainer


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    install(monkeypatch, tmp_path / "site", "openrlhf", "0.11.2", {MODULE: TEXT})
    monkeypatch.setenv("VERL_RC_TOKENS", str(tmp_path / "tokens"))
    hook.attach()
    return imported(monkeypatch, MODULE)


def test_a_step(module: ModuleType, tmp_path: Path) -> None:
    trainer, before = trainer_of(module), experiences()
    samples = experiences()
    assert trainer.train_step(samples, 4) == (samples, 5)
    assert torch.equal(samples[0].attention_mask, before[0].attention_mask)
    assert "make_experience_batch" not in vars(trainer.experience_maker)
    source = token_source(tmp_path / "tokens")
    assert source is not None
    record = source.read(5)
    assert record.facts["trainer"] == "OpenRLHF"
    assert (record.facts["temperature"], record.facts["top_p"]) == (0.8, 0.95)
    assert record.lengths.tolist() == [3, 1]
    assert record.tokens["response_ids"].tolist() == [3, 7, 4, 6]
    assert record.tokens["response_mask"].tolist() == [True, False, True, True]
    assert record.tokens["rollout_log_prob"] == pytest.approx([-0.1, 0.0, -0.2, -0.3])
    assert record.tokens["old_log_prob"] == pytest.approx([-0.6, 0.0, -0.7, -0.8])
    assert record.tokens["advantage"].tolist() == [1.0, 0.0, 1.0, -1.0]
    assert record.rows["score"].tolist() == [1.0, 0.0]
    assert record.rows["finished"].tolist() == [True, False]
    assert record.prompts is not None
    assert [ids.tolist() for ids in record.prompts] == [[1, 2], [5]]


def test_log_probs_of_the_engine_must_be_asked_for(
    module: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = experiences(rollout_log_probs=False)
    assert trainer_of(module).train_step(samples, 0) == (samples, 1)
    assert "--algo.advantage.is_correction_enable must be given" in caplog.text
    assert list((tmp_path / "tokens").iterdir()) == []


def test_another_signature_is_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = TEXT.replace("self, rollout_samples, global_step", "self, global_step, rollout_samples")
    install(monkeypatch, tmp_path / "site", "openrlhf", "0.11.2", {MODULE: text})
    monkeypatch.setenv("VERL_RC_TOKENS", str(tmp_path / "tokens"))
    hook.attach()
    module = imported(monkeypatch, MODULE)
    assert "train_step must take (self, rollout_samples, global_step, …)" in caplog.text
    assert not hasattr(module.BasePPOTrainer.train_step, "__wrapped__")


def test_without_the_variable_nothing_is_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path / "site", "openrlhf", "0.11.2", {MODULE: TEXT})
    monkeypatch.delenv("VERL_RC_TOKENS", raising=False)
    hook.attach()
    assert not hasattr(imported(monkeypatch, MODULE).BasePPOTrainer.train_step, "__wrapped__")
