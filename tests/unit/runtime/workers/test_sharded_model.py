"""Actor and critic, each alone: what is saved comes back, whether it was written at once or beside what
changed meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_checkpoints import change, whole
from small_models import make_tokens, scored, small_run_config
from torch.distributed.tensor import DTensor
from two_processes import free_port

from verl_rc.runtime.checkpoint import shards_problem
from verl_rc.runtime.distributed.fsdp import whole_parameters, without_memory
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.workers.critic_worker import CriticWorker
from verl_rc.runtime.workers.policy_worker import PolicyWorker
from verl_rc.runtime.workers.sharded_model import Learner, ShardedModel


def weights(worker: Learner) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in worker.model.module.named_parameters()}


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("kind", [PolicyWorker, CriticWorker])
def test_what_is_saved_comes_back(
    model_folder: Path, tmp_path: Path, kind: type[Learner], async_save: bool
) -> None:
    own = f"actor_rollout_ref.actor.checkpoint.async_save={async_save}"
    config = small_run_config(model_folder, "algorithm.adv_estimator=gae", own)
    worker = kind(config, RankAddress(0, 1, "127.0.0.1", free_port()), total_steps=10)  # type: ignore[call-arg]
    try:
        assert (worker.model._writer is not None) == async_save
        assert worker.has_saved(wait=False)
        change(worker.model.module)
        saved = weights(worker)
        worker.save(tmp_path / "saved")
        change(worker.model.module)
        assert worker.has_saved(wait=True)
        assert shards_problem(tmp_path / "saved") is None
        assert all(not torch.equal(value, saved[name]) for name, value in weights(worker).items())
        worker.load(tmp_path / "saved")
        assert all(torch.equal(value, saved[name]) for name, value in weights(worker).items())
    finally:
        worker.close()


def test_shards_come_back_when_what_needed_whole_sizes_fails(model_folder: Path) -> None:
    worker = PolicyWorker(
        small_run_config(model_folder), RankAddress(0, 1, "127.0.0.1", free_port()), total_steps=1
    )
    try:
        module = worker.model.module
        before = dict(module.named_parameters())

        def fail() -> None:
            assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
            raise KeyError("no such layer")

        with pytest.raises(KeyError, match="no such layer"), whole_parameters(module, without_memory):
            fail()
        assert all(parameter is before[name] for name, parameter in module.named_parameters())
    finally:
        worker.close()


def test_what_is_freed_is_given_back_after_every_use(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines and other roles on the same GPU are other processes; the device is a CPU that is taken for a
    GPU."""
    given_back: list[str] = []
    monkeypatch.setattr(ShardedModel, "_offload", lambda model: given_back.append("loaded"))
    worker = PolicyWorker(
        small_run_config(model_folder), RankAddress(0, 1, "127.0.0.1", free_port()), total_steps=10
    )
    try:
        assert given_back == ["loaded"]
        monkeypatch.undo()
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append("again"))
        monkeypatch.setattr(worker.model, "_device", torch.device("cuda"))
        tokens = make_tokens([1, 2], [3, 4])
        uses: list[Callable[[], object]] = [
            lambda: scored(worker.compute_log_probs, tokens, [[0, 1]]),
            lambda: worker.save(tmp_path / "saved"),
            lambda: worker.load(tmp_path / "saved"),
        ]
        for number, use in enumerate(uses, start=1):
            use()
            assert len(given_back) == 1 + number
        worker.offer_bucket(0, share=True)
        assert len(given_back) == 4  # weights are in use until the bucket is released
        worker.release_bucket(interrupted=False)
        assert len(given_back) == 5
    finally:
        monkeypatch.undo()
        worker.close()


def test_a_factor_scales_the_learning_rate_of_one_step_alone(model_folder: Path) -> None:
    """AdamW's first step moves every weight with a gradient by the learning rate, whatever the gradient."""
    config = small_run_config(
        model_folder, *(f"actor_rollout_ref.actor.optim.{own}" for own in ("weight_decay=0", "lr=0.01"))
    )
    worker = PolicyWorker(config, RankAddress(0, 1, "127.0.0.1", free_port()), total_steps=10)
    rate, moved = config.actor_rollout_ref.actor.optim.lr, list[float]()
    try:
        for factor in (0.25, 1.0):
            before = weights(worker)
            for parameter in worker.model.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            worker.model.step(factor)
            after = weights(worker)
            moved.append(max(float((after[name] - before[name]).abs().max()) for name in before))
        assert moved == pytest.approx([0.25 * rate, rate], rel=1e-3)
    finally:
        worker.close()
