"""Actor, critic, losses and correction on a CUDA device give what they give on a CPU: python -m pytest -m
gpu."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bypass_cases import CASES, case_batch, case_config, case_id, with_verl_names
from small_models import make_train_batch, ragged, small_run_config, write_small_model
from two_processes import free_port

from verl_rc.algorithm.losses import compute_policy_loss
from verl_rc.algorithm.ppo.in_actor import Corrected, corrected_current
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.correction import compute_rollout_correction
from verl_rc.records.batches import CriticBatch
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.workers import attention
from verl_rc.runtime.workers.critic_worker import CriticWorker
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.packed_layout import Branches, PackedLayout
from verl_rc.runtime.workers.policy_worker import PolicyWorker

pytestmark = pytest.mark.gpu

ROWS = [[0, 1, 2], [3, 4, 5]]
LENGTHS = [7, 2, 5, 0, 1, 6]
GOLDEN = Path(__file__).parents[1] / "golden"
LOSSES: list[dict[str, Any]] = json.loads((GOLDEN / "policy_losses.json").read_text())["cases"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


def worker_on(kind: type, device: str, folder: Path) -> Any:
    config = small_run_config(
        folder,
        f"trainer.device={device}",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "critic.fsdp_config.dtype=float32",
    )
    return kind(config, RankAddress(0, 1, "127.0.0.1", free_port()), total_steps=10)


@pytest.fixture(params=[PolicyWorker, CriticWorker], ids=["actor", "critic"])
def gradients(request: pytest.FixtureRequest, model_folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for device in ("cpu", "cuda"):
        worker = worker_on(request.param, device, model_folder)
        batch: Any = make_train_batch(LENGTHS, (2,))
        counted = batch.response_mask.sum(-1)
        share = MiniBatch(ROWS, int(counted.sum()), int((counted > 0).sum()), int(batch.loss_mask.sum()))
        totals = ObjectiveTotals("actor")
        with worker.model.in_use():
            if request.param is PolicyWorker:
                worker.accumulate(ragged(batch), share, totals, Corrected())
            else:
                torch.nn.init.constant_(worker.model.module.score.weight, 0.1)
                values = torch.zeros(len(LENGTHS), 7)
                critic_batch = CriticBatch(
                    tokens=batch.tokens,
                    response_mask=batch.response_mask,
                    critic_values=values,
                    returns=values + 1,
                    batch_size=[6],
                )
                worker.accumulate(ragged(critic_batch), share, totals)
            found[device] = torch.cat(
                [p.grad.full_tensor().flatten().cpu() for p in worker.model.module.parameters()]
            )
        worker.close()
    return found


def test_gradients_of_the_workers(gradients: dict[str, torch.Tensor]) -> None:
    difference = (gradients["cuda"] - gradients["cpu"]).norm() / gradients["cpu"].norm()
    assert float(difference) < 1e-4


@pytest.mark.parametrize("case", LOSSES[::5], ids=lambda case: f"{case['name']}-{case['loss_agg_mode']}")
def test_golden_policy_losses(case: dict[str, Any]) -> None:
    def on_gpu(name: str) -> torch.Tensor | None:
        return None if case[name] is None else torch.tensor(case[name], device="cuda")

    log_probs = torch.tensor(case["log_probs"], device="cuda", requires_grad=True)
    loss, _ = compute_policy_loss(
        case["name"],
        old_log_probs=on_gpu("old_log_probs"),
        log_probs=log_probs,
        advantages=on_gpu("advantages"),
        loss_mask=on_gpu("response_mask").bool(),
        rollout_is_weights=on_gpu("rollout_is_weights"),
        config=case["config"],
        aggregation=case["loss_agg_mode"],
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(case["expected"]["loss"], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(
        log_probs.grad.cpu(), torch.tensor(case["expected"]["grad"]), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_correction(case: dict[str, Any]) -> None:
    batch, config = case_batch(case).to("cuda"), case_config(case)
    log_probs = torch.tensor(case["log_probs"], device="cuda")
    corrected, _ = corrected_current(batch, log_probs, config, 0)
    keep = torch.tensor(case["expected"]["keep_mask"]).bool()
    assert torch.equal(corrected.loss_mask.cpu(), keep & batch.response_mask.cpu())
    result = compute_rollout_correction(log_probs, batch.rollout_log_probs, batch.response_mask, config)
    found = with_verl_names(result.metrics(), config)
    for name, value in case["expected"]["metrics"].items():
        if name.startswith("rollout_corr/"):
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("with_branches", [False, True])
def test_packed_attention_without_padding(with_branches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention's kernel for sequences of different lengths, against the padded grid; with gradients.
    Two branches begin with 150 tokens of the first sequence and all 77 of the third."""
    layout, found, tokens = PackedLayout.from_lengths(torch.tensor([200, 1, 77, 130], device="cuda")), [], 408
    if with_branches:
        tokens = 408 + 85
        places = [torch.arange(150), torch.arange(408, 468), torch.arange(201, 278), torch.arange(468, 493)]
        branches = Branches.from_lengths([60, 25], [210, 102], torch.cat(places), torch.device("cuda"))
        positions = torch.cat([layout.position_ids, torch.arange(85, device="cuda")])
        layout = replace(layout, position_ids=positions, branches=branches)
    for in_one_kernel in (True, False):
        generator = torch.Generator("cuda").manual_seed(0)
        parts = [
            torch.randn(
                1, heads, tokens, 64, device="cuda", dtype=torch.bfloat16, generator=generator
            ).requires_grad_()
            for heads in (4, 2, 2)
        ]
        assert attention.runs_flash_kernels(parts[0]), "this GPU has no such kernel"
        monkeypatch.setattr(attention, "runs_flash_kernels", lambda _, chosen=in_one_kernel: chosen)
        output, _ = attention.packed_sdpa(torch.nn.Identity(), *parts, None, packed_layout=layout)
        monkeypatch.undo()
        output.float().square().sum().backward()
        found.append([output.detach(), *(part.grad for part in parts)])
    for packed, grid in zip(*found, strict=True):
        assert float((packed - grid).float().norm() / grid.float().norm()) < 1e-2
