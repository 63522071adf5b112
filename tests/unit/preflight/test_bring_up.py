"""``doctor --gpu``: a stage that fails, hangs or dies does not end the others, and ranks and lent memory are
really tried."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import small_run_config

from verl_rc.cli import USER_ERROR, main
from verl_rc.config.run import RunConfig
from verl_rc.data.batches import TokenBatch, TrainBatch
from verl_rc.metrics.record import Metric, Reduction
from verl_rc.ppo.mini_batches import MiniBatchShare
from verl_rc.preflight.bring_up import run
from verl_rc.preflight.bring_up import stages as stage_module
from verl_rc.preflight.bring_up.run import STAGES, bring_up
from verl_rc.preflight.bring_up.stages import Stages
from verl_rc.preflight.memory import ModelShape, RoleMemory
from verl_rc.workers.updates import UpdateRequest


def test_every_stage_runs_whatever_the_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_TARGET", "planted_stages:PlantedStages")
    limits = {"raising": 300.0, "hanging": 300.0, "wrong": 300.0, "dying": 300.0, "fine": 300.0}
    whole = run.ChildProcess.ask

    def ask(self: run.ChildProcess, method: str, timeout_seconds: float) -> None:
        # Only the call of the stage that hangs is cut short: a busy machine may take long to start the
        # others.
        whole(self, method, timeout_seconds=1.0 if method == "hanging" else timeout_seconds)

    monkeypatch.setattr(run.ChildProcess, "ask", ask)
    killed: list[object] = []
    kill = run.ChildProcess.kill

    def kill_child(self: run.ChildProcess) -> None:
        killed.append(self.connection.closed)
        kill(self)

    monkeypatch.setattr(run.ChildProcess, "kill", kill_child)
    started, config = time.perf_counter(), small_run_config(tmp_path, f"trainer.default_local_dir={tmp_path}")
    found = {finding.subject: finding for finding in bring_up(config, tmp_path / "found.json", limits)}
    assert time.perf_counter() - started < 300
    assert {name: finding.status for name, finding in found.items()} == {
        **dict.fromkeys(limits, "failed"),
        "fine": "ok",
    }
    assert found["raising"].found.endswith("ValueError: the link is down")
    assert "no answer after" in found["hanging"].found
    assert killed.count(False) == 1  # the one that hangs, before it is asked to end by closing the connection
    assert found["dying"].found == "its process ended with exit code 9"
    assert (found["wrong"].must, found["fine"].found) == ("it must be 4", str(tmp_path))
    written = json.loads((tmp_path / "found.json").read_text())
    assert list(written) == list(limits)
    assert written["fine"]["numbers"] == {"seconds": 1.5}
    assert written["dying"]["status"] == "failed"


def test_stages_have_a_limit_each() -> None:
    assert all(callable(getattr(Stages, name)) and limit > 0 for name, limit in STAGES.items())


def test_two_ranks_reduce_and_a_process_copies_what_another_lends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "_RING_MIB", (1, 4, 16))  # 256 MiB take seconds
    monkeypatch.setattr(stage_module, "_LENT_MIB", 16)
    stages = Stages(small_run_config(tmp_path, "trainer.device=cpu", "trainer.n_gpus_per_node=2"))
    reduced = stages.ring()
    assert [finding.status for finding in reduced.findings] == ["ok"] * 3
    size = reduced.numbers["16_MiB"]
    assert size["bus_bytes_per_second"] == pytest.approx((16 << 20) / size["seconds"])  # 2 (n - 1) / n is 1
    lent = stages.lending()
    assert [finding.status for finding in lent.findings] == ["ok"]
    assert lent.numbers["seconds"] > 0


ROWS = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--only=ring,"], "--only must name one of machine, ring"),
        (["--gpu", "trainer.device=auto"], "trainer.device=cpu"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ("actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v", ROWS)
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *files, *arguments])
    assert stopped.value.code == USER_ERROR
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


GIB = 1 << 30
SHAPE = ModelShape(1_000_000_000, 200_000_000, 500_000, 10, 2000, 1000, 4096)


class FakeRank:
    """A rank of two with a known peak of memory: it holds whole gradients only where a mini-batch has a
    second micro-batch to add them up over."""

    def __init__(self, needs: RoleMemory) -> None:
        self._needs = needs

    def ask(self, method: str, *arguments: Any) -> None:
        self.answer = lambda: getattr(self, method)(*arguments)

    def compute_log_probs(self, tokens: TokenBatch, micro_batches: list[list[int]]) -> tuple[torch.Tensor]:
        assert sorted(row for rows in micro_batches for row in rows) == list(range(len(tokens)))
        return (torch.zeros(tokens.responses.shape),)

    def update(
        self, batch: TrainBatch, mini_batches: list[MiniBatchShare], request: UpdateRequest
    ) -> SimpleNamespace:
        (share,) = mini_batches
        assert sorted(row for rows in share.micro_batches for row in rows) == list(range(len(batch)))
        accumulates = len(share.micro_batches) > 1
        peak = self._needs.model - (0 if accumulates else self._needs.gradients)
        return SimpleNamespace(metrics=[Metric("perf/max_memory_allocated_gb", peak / GIB, Reduction.MAX)])

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("missing", "status"), [(0, "ok"), (GIB // 2, "failed")])
def test_an_estimate_that_is_too_low_is_seen(
    missing: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: half a GiB of the gradients is left out. One micro-batch adds nothing up and would pass."""
    given = ("trainer.device=cuda", "trainer.n_gpus_per_node=2", "data.train_batch_size=4")
    stages = Stages(small_run_config(tmp_path, *given, "actor_rollout_ref.actor.ppo_mini_batch_size=4"))
    actor = RoleMemory("actor", processes=2, weights=2 * GIB, gradients=4 * GIB)
    estimated = replace(actor, gradients=actor.gradients - missing)
    decided: list[RunConfig] = []

    @contextmanager
    def ranks(target: str, config: RunConfig, total_steps: int) -> Iterator[list[FakeRank]]:
        decided.append(config)
        yield [FakeRank(actor), FakeRank(actor)]

    monkeypatch.setattr(stages, "_ranks", ranks)
    monkeypatch.setattr(stages, "_shape", lambda: SHAPE)
    monkeypatch.setattr(stage_module, "estimate_roles", lambda *_: [estimated])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * GIB, 80 * GIB))
    report = stages.trainer()
    assert {finding.subject: finding.status for finding in report.findings} == {
        "gradients": "note",
        "trainer": "ok",
        "peak memory": status,
    }
    assert report.numbers["peak_bytes"] == 6 * GIB
    # As a run decides it: whole gradients, where an update with them fits.
    assert decided[0].actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation is True


def test_what_does_not_fit_one_node_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32B of four nodes on one: no out of memory after minutes of loading, but a note."""
    stages = Stages(small_run_config(tmp_path, "trainer.device=cuda"))
    monkeypatch.setattr(stages, "_shape", lambda: SHAPE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, GIB))
    (note,) = stages.trainer().findings
    assert note.status == "note"
    assert "of a GPU's 1.00 GiB on one node" in note.found
