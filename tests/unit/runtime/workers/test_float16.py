"""Learning in float16: small gradients survive, overflows are skipped and end, and a resumed run has the same
scale."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_checkpoints import whole
from small_models import make_train_batch, ragged, small_run_config, write_small_model
from two_processes import free_port

from verl_rc.algorithm.health.run_limits import NonFiniteGradientsError, count_nonfinite_updates
from verl_rc.algorithm.ppo.in_actor import Corrected
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.records.batches import TrainBatch
from verl_rc.records.optimizer_step import OptimizerStep
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.workers import float16
from verl_rc.runtime.workers.float16 import LossScale, SlowFloat16Error, require_float16_products
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.policy_worker import PolicyWorker

DTYPE = "actor_rollout_ref.actor.fsdp_config.dtype"
CPU = torch.device("cpu")
Build = Callable[..., PolicyWorker]


@pytest.fixture
def build(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Actors of one rank on a CPU that is taken to have products in float16."""
    # Gradients of a tied model with weights this large overflow at the first scale.
    model_folder = write_small_model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)
    monkeypatch.setattr(float16, "float16_product_seconds", lambda: (1e-3, 1e-3))
    workers: list[PolicyWorker] = []

    def build_one(*options: str) -> PolicyWorker:
        for worker in workers:
            worker.close()
        config = small_run_config(model_folder, "actor_rollout_ref.actor.optim.lr=0.01", *options)
        torch.manual_seed(0)
        workers[:] = [PolicyWorker(config, RankAddress(0, 1, "127.0.0.1", free_port()), total_steps=10)]
        return workers[0]

    yield build_one
    for worker in workers:
        worker.close()


def step(worker: PolicyWorker, factor: float = 1.0) -> OptimizerStep:
    """One optimizer step on a batch whose advantages are multiplied by ``factor``."""
    batch = make_train_batch([7, 2, 5, 1])
    batch.advantages = batch.advantages * factor
    worker.accumulate(ragged(batch), share_of(batch), ObjectiveTotals("actor"), Corrected())
    return worker.model.step()


def share_of(batch: TrainBatch) -> MiniBatch:
    counted = batch.response_mask.sum(-1)
    return MiniBatch([[0, 1], [2, 3]], int(counted.sum()), len(counted), int(batch.loss_mask.sum()))


def weights(worker: PolicyWorker) -> torch.Tensor:
    return torch.cat([whole(parameter).flatten() for parameter in worker.model.module.parameters()]).clone()


def test_norms_are_those_of_float32_however_small_the_gradient(build: Build) -> None:
    """The smallest number of float16 is 6e-8."""
    expected = step(build()).grad_norm
    for factor in (1.0, 1e-8):
        taken = step(build(f"{DTYPE}=fp16"), factor)
        assert taken.outcome == "trained"
        assert taken.loss_scale == 65536
        assert taken.grad_norm == pytest.approx(expected * factor, rel=0.02)


def test_an_overflow_changes_nothing_but_the_scale_until_the_gradient_fits(build: Build) -> None:
    worker = build(f"{DTYPE}=float16")
    before = weights(worker)
    scales, outcomes = [], []
    for _ in range(20):
        taken = step(worker, 1e3)
        scales.append(taken.loss_scale)
        outcomes.append(taken.outcome)
        if taken.outcome == "trained":
            break
        assert torch.equal(weights(worker), before)
        assert not worker.model.optimizer.state
    assert outcomes[-1] == "trained"
    assert outcomes[:-1] == ["overflow"] * len(outcomes[:-1])
    assert len(outcomes) > 2
    assert scales == [65536 / 2**count for count in range(len(scales))]
    assert not torch.equal(weights(worker), before)


def test_the_scale_is_doubled_after_two_thousand_steps_and_never_below_one() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    scale, expected, steps_since = LossScale(torch.float16, CPU), 65536.0, 0
    for count in range(2100):
        is_finite = count not in (5, 9)
        scale.scale(parameter.sum() * (1.0 if is_finite else math.inf)).backward()
        scale.unscale_(optimizer)
        if is_finite:
            assert parameter.grad is not None
            assert parameter.grad.tolist() == [1.0] * 3
        optimizer.zero_grad()
        scale.adjust()
        steps_since = steps_since + 1 if is_finite else 0
        expected *= 1.0 if is_finite else 0.5
        if steps_since == 2000:
            expected, steps_since = expected * 2, 0
        assert scale.value == expected
    assert expected == 65536 / 4 * 2


def test_a_row_without_end_ends(build: Build) -> None:
    """A gradient that no scale makes finite is a fault once the scale is 1, 16 halvings later."""
    worker = build(f"{DTYPE}=fp16")
    skipped = [step(worker, math.nan) for _ in range(19)]
    assert count_nonfinite_updates(0, "actor", skipped[:16], limit=1) == 0
    assert count_nonfinite_updates(0, "actor", skipped[:18], limit=3) == 2
    with pytest.raises(NonFiniteGradientsError, match="3 optimizer steps in a row"):
        count_nonfinite_updates(0, "actor", skipped, limit=3)


def test_a_skipped_update_ends_no_row_of_faults() -> None:
    row = [OptimizerStep(math.nan, 1.0), OptimizerStep(math.inf, 2.0), OptimizerStep(math.nan, 1.0)]
    assert count_nonfinite_updates(0, "actor", row, limit=3) == 2


def test_a_resumed_run_has_the_same_scale_and_weights_to_the_bit(build: Build, tmp_path: Path) -> None:
    worker = build(f"{DTYPE}=fp16")
    for factor in (math.inf, 1.0, 1.0):
        step(worker, factor)
    worker.save(tmp_path / "saved")
    expected = [repr(step(worker, factor)) for factor in (1.0, math.inf, 1.0)]
    expected_weights, expected_state = weights(worker), worker.model._loss_scale.state_dict()
    assert expected_state["scale"] == 65536 / 4
    assert expected_state["_growth_tracker"] == 1
    worker = build(f"{DTYPE}=fp16")
    worker.load(tmp_path / "saved")
    assert worker.model._loss_scale.state_dict()["_growth_tracker"] == 2
    assert [repr(step(worker, factor)) for factor in (1.0, math.inf, 1.0)] == expected
    assert torch.equal(weights(worker), expected_weights)
    assert worker.model._loss_scale.state_dict() == expected_state


@pytest.mark.parametrize(("saved", "resumed", "scale"), [("fp16", "bf16", None), ("bf16", "fp16", 65536.0)])
def test_a_run_may_go_on_in_another_precision(
    build: Build, tmp_path: Path, saved: str, resumed: str, scale: float | None
) -> None:
    worker = build(f"{DTYPE}={saved}")
    step(worker)
    worker.save(tmp_path / "saved")
    worker = build(f"{DTYPE}={resumed}")
    worker.load(tmp_path / "saved")
    assert step(worker).loss_scale == scale


def test_a_cpu_without_products_in_float16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float16, "float16_product_seconds", lambda: (5e-3, 1e-3))
    with pytest.raises(SlowFloat16Error, match=r"at most 4 times .*got 5\.00 and 1\.00 ms; pass .*bfloat16"):
        require_float16_products(torch.float16, CPU)
    require_float16_products(torch.bfloat16, CPU)
    require_float16_products(torch.float16, torch.device("cuda"))


def test_both_products_are_measured() -> None:
    assert all(0 < seconds < 60 for seconds in float16.float16_product_seconds())
