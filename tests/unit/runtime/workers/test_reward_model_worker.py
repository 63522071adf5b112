"""The reward model's scores: those of the model called by hand, whatever the batch."""

from pathlib import Path

import pytest
import torch
from small_models import write_small_model
from small_reward_models import conversation, write_reward_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from verl_rc.config.task import RewardModelConfig
from verl_rc.runtime.workers import reward_model_worker
from verl_rc.runtime.workers.reward_model_worker import TransformersRewardModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("judge"))


def worker(folder: Path, **fields: object) -> TransformersRewardModel:
    return TransformersRewardModel(
        RewardModelConfig.model_validate({"enable": True, "model_path": str(folder), **fields})
    )


@pytest.mark.parametrize("has_padding", [True, False])
def test_scores_are_the_models_logits_whatever_the_batch(tmp_path: Path, has_padding: bool) -> None:
    folder = write_reward_model(tmp_path, has_padding=has_padding)
    texts = [("21", "12"), ("4071835926", "0123456789"), ("3", ""), ("5", "x")]
    conversations = [conversation(question, answer) for question, answer in texts]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = []
    for question, answer in texts:
        bytes_and_end = [*AutoTokenizer.from_pretrained(folder)(f"{question}={answer}").input_ids, 256]
        expected.append(float(model(torch.tensor([bytes_and_end])).logits[0, 0].detach()))
    assert len({round(value, 3) for value in expected}) == 4
    for size in (1, 3, 8):
        assert worker(folder, micro_batch_size_per_gpu=size).score(conversations) == pytest.approx(
            expected, abs=1e-5
        )


def test_long_conversations_get_a_reason_and_the_others_their_score(folder: Path) -> None:
    texts = [conversation("1", "2"), conversation("1", 30 * "23"), conversation("1", "2")]
    first, long, last = worker(folder, max_length=8).score(texts)
    assert long == (
        "a conversation must have at most 8 tokens (reward.reward_model.max_length, or what the model's "
        "positions allow), got 63"
    )
    assert first == last == pytest.approx(worker(folder).score(texts[:1])[0], abs=1e-5)
    fits, is_over = worker(folder).score([texts[1], conversation("1", 31 * "23")])
    assert isinstance(fits, float)
    assert "at most 64 tokens" in str(is_over)


def test_a_score_that_is_not_finite_is_none(folder: Path) -> None:
    judge = worker(folder)
    with torch.no_grad():
        judge._model.score.weight.fill_(float("nan"))
    assert judge.score([conversation("1", "2")]) == ["the reward model's score must be finite, got nan"]


def test_other_models_are_refused(tmp_path: Path, folder: Path) -> None:
    two = write_reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(ValueError, match=r"one output \(num_labels=1\), .* has 2"):
        worker(two)
    policy = write_small_model(tmp_path / "policy")
    AutoTokenizer.from_pretrained(folder).save_pretrained(policy)
    with pytest.raises(
        ValueError,
        match=r"must be a trained sequence classifier, but .* lacks the weights \['score.weight'\]",
    ):
        worker(policy)


def test_precision_device_and_code_of_its_own_are_as_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker(folder, dtype="bfloat16")._model.dtype == torch.bfloat16
    arguments: list[object] = []
    monkeypatch.setattr(reward_model_worker, "load_tokenizer", lambda path, trust: arguments.append(trust))
    monkeypatch.setattr(
        reward_model_worker, "trainer_device", lambda kind: arguments.append(kind) or torch.device("cpu")
    )
    worker(folder)
    worker(folder, trust_remote_code=True, n_gpus_per_node=1)
    assert arguments == ["cpu", False, "cuda", True]
