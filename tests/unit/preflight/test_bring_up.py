"""``doctor --gpu``: a stage that fails, hangs or dies does not end the others, and ranks and lent memory are
really tried."""

import json
import time
from pathlib import Path

import pytest
from small_models import small_run_config

from verl_rc.cli import USER_ERROR, main
from verl_rc.preflight.bring_up import run
from verl_rc.preflight.bring_up import stages as module
from verl_rc.preflight.bring_up.run import STAGES, bring_up
from verl_rc.preflight.bring_up.stages import Stages


def test_every_stage_runs_whatever_the_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_TARGET", "planted_stages:PlantedStages")
    limits = {"raising": 300.0, "hanging": 300.0, "wrong": 300.0, "dying": 300.0, "fine": 300.0}
    whole = run.ChildProcess.ask

    def ask(self: run.ChildProcess, method: str, timeout_seconds: float) -> None:
        # Only the call of the stage that hangs is cut short: a busy machine may take long to start the
        # others.
        whole(self, method, timeout_seconds=1.0 if method == "hanging" else timeout_seconds)

    monkeypatch.setattr(run.ChildProcess, "ask", ask)
    started, config = time.perf_counter(), small_run_config(tmp_path, f"trainer.default_local_dir={tmp_path}")
    found = {finding.subject: finding for finding in bring_up(config, tmp_path / "found.json", limits)}
    assert time.perf_counter() - started < 300
    assert {name: finding.status for name, finding in found.items()} == {
        **dict.fromkeys(limits, "failed"),
        "fine": "ok",
    }
    assert found["raising"].found.endswith("ValueError: the link is down")
    assert "no answer after" in found["hanging"].found
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
    monkeypatch.setattr(module, "_RING_MIB", (1, 4, 16))  # 256 MiB take seconds
    monkeypatch.setattr(module, "_LENT_MIB", 16)
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
