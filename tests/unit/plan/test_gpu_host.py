"""A machine that cannot run the GPU build is refused before anything is downloaded: driver, cuda-compat, C
compiler, headers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import ROOT

from verl_rc.plan import gpu_host


def program(folder: Path, name: str, script: str = "") -> None:
    """An executable shell script in ``folder``."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """The only folder in PATH: a compiler, and no driver yet."""
    program(tmp_path / "tools", "gcc")
    return tmp_path / "tools"


def check(tools: Path, **environment: str) -> tuple[int, str]:
    """Exit status and output of the check, in an interpreter without any installed package."""
    command = [sys.executable, "-S", "-m", "verl_rc.plan.gpu_host"]
    answer = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": str(tools), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stderr == ""
    return answer.returncode, answer.stdout


@pytest.mark.parametrize(
    ("driver", "status"),
    [("580.65.06", 0), ("590.1", 0), ("575.57.08", 1), ("570.124.06", 1), ("550.54", 1)],
)
def test_the_driver_that_the_wheels_need(driver: str, status: int, tools: Path) -> None:
    """CUDA 13 needs driver 580; CUDA 12.8 came with 570."""
    program(tools, "nvidia-smi", f"echo {driver}\necho {driver}")
    found, output = check(tools)
    assert found == status
    for way_out in ("needs driver 580 or newer", "cuda-compat-13-0", "docker/Dockerfile.gpu"):
        assert (way_out in output) == (status == 1)


@pytest.mark.parametrize(("supported", "status"), [(13000, 0), (12080, 1)])
def test_an_older_driver_with_cuda_compat(supported: int, status: int, tools: Path, tmp_path: Path) -> None:
    """What the loader finds counts: the library of the package, or that of the old driver."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc to build a libcuda")
    library = tmp_path / "compat" / "libcuda.so.1"
    library.parent.mkdir()
    code = f"int cuDriverGetVersion(int *version) {{ *version = {supported}; return 0; }}"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=code, text=True, check=True
    )
    program(tools, "nvidia-smi", "echo 570.124.06")
    found, output = check(tools, LD_LIBRARY_PATH=str(library.parent))
    assert found == status
    assert ("libcuda supports CUDA 12.8" in output) == (status == 1)


def test_where_an_image_is_built_there_is_no_driver(tools: Path) -> None:
    assert check(tools) == (0, "")
    program(tools, "nvidia-smi", "exit 9")  # as it does where the kernel's module is not loaded
    assert check(tools) == (0, "")


def test_without_a_compiler(tools: Path) -> None:
    assert check(tools, CC="no-such-cc")[0] == 1
    (tools / "gcc").rename(tools / "clang")
    assert check(tools) == (0, "")
    (tools / "clang").unlink()
    status, output = check(tools)
    assert status == 1
    assert f"build-essential python3.{sys.version_info.minor}-dev" in output


def test_without_the_headers_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_host.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (_, header) = gpu_host.check_compiler()
    assert (header.status, header.subject) == ("failed", "Python.h")
    (tmp_path / "Python.h").touch()
    (_, header) = gpu_host.check_compiler()
    assert header.status == "ok"


@pytest.mark.parametrize(
    ("cuda", "driver", "status"),
    [("12.8", "570.1", "ok"), ("12.8", "470.82", "failed"), ("14.1", "580", "ok")],
)
def test_other_versions_of_cuda(cuda: str, driver: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_host, "driver_version", lambda: driver)
    (finding,) = gpu_host.check_driver(cuda)
    assert finding.status == status


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("driver", "needs driver 580 or newer"), ("compiler", "sudo apt install build-essential")],
)
def test_install_fails_before_it_makes_or_downloads_anything(
    fault: str, sentence: str, tools: Path, tmp_path: Path
) -> None:
    program(tools, "nvidia-smi", "echo 570.124.06" if fault == "driver" else "echo 580.65.06")
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "VERL_RC_VENV": str(tmp_path / "venv"),
        "PIP_NO_INDEX": "1",
        **({"CC": "no-such-cc"} if fault == "compiler" else {}),
    }
    command = ["bash", "scripts/install.sh", "gpu"]
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert answer.returncode == 1
    assert sentence in answer.stderr
    assert "nothing was downloaded" in answer.stderr
    assert not (tmp_path / "venv").exists()
