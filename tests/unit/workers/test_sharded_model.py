"""Actor and critic, each alone: what is saved comes back, whether it was written at once or beside what
changed meanwhile."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_checkpoints import change, whole
from small_models import make_tokens, small_run_config
from torch.distributed.tensor import DTensor, distribute_tensor
from two_processes import free_port, run_ranks

from verl_rc.checkpoint import shards_problem
from verl_rc.distributed.fsdp import whole_parameters, without_memory
from verl_rc.distributed.process_group import RankAddress
from verl_rc.workers.critic_worker import CriticWorker
from verl_rc.workers.policy_worker import PolicyWorker
from verl_rc.workers.sharded_model import Learner, ShardedModel


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


def give_gradients(module: torch.nn.Module, number: int, scale: float) -> list[torch.Tensor]:
    """The same on any number of ranks; returns them whole, in float64."""
    generator = torch.Generator().manual_seed(number)
    given = []
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor)
        gradient = scale * torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        given.append(gradient.double().flatten())
    return given


def compare_with_the_past(rank: int, ranks: int, model_folder: Path, port: int) -> None:
    """Four steps, the third dropped: a loop over moments in float64 has the same cosines."""
    clip = "actor_rollout_ref.actor.optim.clip_grad=0.5"
    config = small_run_config(model_folder, clip)
    worker = PolicyWorker(config, RankAddress(rank, ranks, "127.0.0.1", port), total_steps=10)
    try:
        model = worker.model
        moment: torch.Tensor | None = None
        for number, scale in enumerate((1e-3, 2.0, math.inf, 1e-4)):
            whole_gradient = torch.cat(give_gradients(model.module, number, scale))
            step = model.step()
            if math.isinf(scale):
                assert step.outcome == "nonfinite"
                assert step.cosine_with_past is None
                continue
            if moment is None:
                assert step.cosine_with_past is None
                moment = torch.zeros_like(whole_gradient)
            else:
                cosine = whole_gradient @ moment / whole_gradient.norm() / moment.norm()
                assert step.cosine_with_past == pytest.approx(float(cosine), rel=1e-3)
            clipped = whole_gradient * min(1.0, 0.5 / float(whole_gradient.norm()))
            moment = 0.9 * moment + 0.1 * clipped
    finally:
        worker.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_cosine_of_a_gradient_and_those_before_is_that_of_whole_gradients(
    model_folder: Path, ranks: int
) -> None:
    if ranks == 1:
        compare_with_the_past(0, 1, model_folder, free_port())
    else:
        run_ranks(ranks, compare_with_the_past, ranks, model_folder, free_port())


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
            lambda: worker.compute_log_probs(tokens, [[0, 1]]),
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
