"""A teacher of another shape scores as it would alone, and the update made of its scores is the same however
rows are cut, ordered, padded or spread over ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import (
    VOCABULARY,
    log_probs,
    make_train_batch,
    ragged,
    scored,
    small_model_config,
    small_run_config,
)
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from two_processes import free_port

from verl_rc.algorithm.ppo.in_actor import Corrected
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.records.batches import TrainBatch, positions_mask
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.workers.forward import ForwardOptions
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.policy_worker import FrozenWorker, PolicyWorker

LENGTHS, REJECTED = [7, 2, 5, 0, 1, 6], (2,)
ROWS = list(range(len(LENGTHS)))
LOSS = "distillation.distillation_loss"
TERMS = {
    "advantages alone": {"loss_mode": "k1", "use_policy_gradient": True, "use_task_rewards": False},
    "advantages beside the task": {"loss_mode": "k1", "use_policy_gradient": True, "loss_max_clamp": 1.0},
    "divergence alone": {"loss_mode": "k3", "use_task_rewards": False},
    "divergence beside the task": {"loss_mode": "k2", "distillation_loss_coef": 0.3},
    "its likeliest tokens": {"loss_mode": "forward_kl_topk", "use_task_rewards": False},
}


@pytest.fixture(scope="module")
def workers(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PolicyWorker, FrozenWorker, Path]]:
    folder = tmp_path_factory.mktemp("teacher")
    shape = small_model_config(VOCABULARY)
    shape.num_hidden_layers, shape.layer_types = 1, shape.layer_types[:1]
    torch.manual_seed(5)
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    section = "distillation.teacher_models.teacher_model"
    config = small_run_config(
        model_folder,
        "distillation.enabled=True",
        f"{section}.model_path={folder}",
        "actor_rollout_ref.ref.fsdp_config.dtype=float32",
        f"{LOSS}.loss_mode=forward_kl_topk",
        f"{LOSS}.topk=4",
    )
    address = RankAddress(0, 1, "127.0.0.1", free_port())
    policy = PolicyWorker(config, address, total_steps=10)
    yield policy, FrozenWorker(config, address, total_steps=10, role="teacher"), folder
    policy.close()


@pytest.fixture(scope="module")
def batch(workers: tuple[PolicyWorker, FrozenWorker, Path]) -> TrainBatch:
    policy, teacher, _ = workers
    batch = make_train_batch(LENGTHS, REJECTED)
    current = scored(policy.compute_log_probs, batch.tokens, [ROWS])[0]
    noise = 0.2 * torch.randn(current.shape, generator=torch.Generator().manual_seed(7))
    batch.old_log_probs = torch.where(batch.response_mask, current + noise, 0.0)
    batch.teacher_log_probs, ids, batch.teacher_top_log_probs = scored(
        teacher.compute_log_probs, batch.tokens, [[0, 1, 2], [3, 4, 5]]
    )
    batch.teacher_top_ids = ids.int()
    return batch


def test_a_teacher_of_another_shape_scores_as_it_would_alone(
    workers: tuple[PolicyWorker, FrozenWorker, Path], batch: TrainBatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(workers[2])
    tokens = batch.tokens
    for row in (row for row in ROWS if LENGTHS[row]):
        prompt = tokens.prompts[row, -int(tokens.prompt_lengths[row]) :].tolist()
        response = tokens.responses[row, : LENGTHS[row]].tolist()
        assert batch.teacher_log_probs is not None
        found = batch.teacher_log_probs[row, : LENGTHS[row]]
        torch.testing.assert_close(found, log_probs(model, prompt, response), rtol=1e-4, atol=1e-5)
        assert batch.teacher_top_ids is not None
        assert batch.teacher_top_log_probs is not None
        table = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        values, ids = table[len(prompt) - 1 : -1].topk(4, dim=-1)
        assert torch.equal(batch.teacher_top_ids[row, : LENGTHS[row]].long(), ids)
        top = batch.teacher_top_log_probs[row, : LENGTHS[row]]
        torch.testing.assert_close(top, values, rtol=1e-4, atol=1e-5)


def gradient(worker: PolicyWorker, batch: TrainBatch, micro_batches: list[list[int]]) -> torch.Tensor:
    counted, kept = LENGTHS, int(make_train_batch(LENGTHS, REJECTED).loss_mask.sum())
    share = MiniBatch(micro_batches, sum(counted), sum(length > 0 for length in counted), kept)
    worker.accumulate(ragged(batch), share, ObjectiveTotals("actor"), Corrected())
    flat = torch.cat([p.grad.full_tensor().flatten() for p in worker.model.module.parameters()]).double()  # type: ignore[union-attr]
    worker.model.optimizer.zero_grad()
    return flat


@pytest.mark.parametrize("term", list(TERMS))
def test_nothing_but_the_tokens_decides_the_update(
    workers: tuple[PolicyWorker, FrozenWorker, Path], batch: TrainBatch, term: str
) -> None:
    worker, _, _ = workers
    worker._distillation = small_run_config(
        Path("unused"),
        "distillation.enabled=True",
        "distillation.teacher_models.teacher_model.model_path=unused",
        *(f"{LOSS}.{key}={value}" for key, value in TERMS[term].items()),
    ).distillation.loss
    whole = gradient(worker, batch, [ROWS])
    assert whole.norm() > 0

    def is_the_same(other: torch.Tensor) -> bool:
        return float((other - whole).norm() / whole.norm()) <= 1e-5

    assert is_the_same(gradient(worker, batch, [[5, 0], [1], [], [2, 3, 4]]))
    # shares of two ranks, whose gradients are added up
    assert is_the_same(gradient(worker, batch, [[0, 3, 4]]) + gradient(worker, batch, [[1, 2, 5]]))
    assert not is_the_same(gradient(worker, batch, [[0, 3, 4]]) + gradient(worker, batch, [[1, 2]]))
    order = [3, 5, 0, 2, 4, 1]
    assert is_the_same(gradient(worker, batch[torch.tensor(order)], [ROWS]))
    options, worker._forward = worker._forward, ForwardOptions(1.0, remove_padding=False)
    spoilt = batch.clone()
    assert batch.teacher_log_probs is not None
    padding = ~positions_mask(batch.tokens.response_lengths, 7)
    spoilt.teacher_log_probs = batch.teacher_log_probs.masked_fill(padding, torch.nan)
    assert batch.teacher_top_log_probs is not None
    spoilt.teacher_top_log_probs = batch.teacher_top_log_probs.masked_fill(padding[..., None], torch.nan)
    assert is_the_same(gradient(worker, spoilt, [ROWS]))
    worker._forward = options
