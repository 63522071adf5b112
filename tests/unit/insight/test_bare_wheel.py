"""The wheel without an extra stands beside another trainer: no version moves there, and the readers run."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from built_wheel import Environment, build_wheel
from planted_series import COOLER, SIGNS, healthy, write_run
from recorded_tokens import token_record, write_tokens
from small_runs import ROOT

NAMED = "The engine samples at temperature 0.90"
TORCH_OF_TODAY = os.environ.get("VERL_RC_TEST_TORCH", "torch")
CORRECTION = """
import sys, torch
from verl_rc.correction import compute_rollout_correction
train, rollout = torch.full((1, 2), -1.0), torch.tensor([[-1.0, -2.0]])
mask = torch.ones(1, 2, dtype=torch.bool)
found = compute_rollout_correction(train, rollout, mask, {"rollout_is": "token"})
assert found.weights.tolist() == [[1.0, 2.0]], found.weights
assert "tensordict" not in sys.modules
"""
"""exp(0) and exp(1) at most 2, the default threshold."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_every_file_of_the_page(wheel: Path) -> None:
    folder = "verl_rc/insight/page/assets"
    with zipfile.ZipFile(wheel) as archive:
        packed = {Path(name).name: archive.read(name) for name in archive.namelist() if folder in name}
    assert packed == {path.name: path.read_bytes() for path in (ROOT / folder).iterdir()}


def planted_run(folder: Path) -> Path:
    """A run whose engine samples at temperature 0.9, with token records."""
    series = healthy() | {f"rollout_corr/{name}": [value] * 40 for name, value in (SIGNS | COOLER).items()}
    run = write_run(folder / "run", series)
    write_tokens(run, [token_record(40, [3, 2] * 4, gap=0.02)])
    return run


def check_readers(environment: Environment, run: Path) -> None:
    """What the readers say of the planted run."""
    assert "decoupled_seq_is: rollout_is=sequence" in environment.tool("presets")
    assert NAMED in environment.tool("report", run)
    assert "uPlot" in (run / "report.html").read_text()
    assert NAMED in environment.tool("diagnose", run)


def is_usable(python: str) -> bool:
    return shutil.which(python) is not None and not subprocess.run([python, "-c", ""], check=False).returncode


@pytest.mark.parametrize(
    "python",
    [
        sys.executable,
        *(pytest.param(f"python3.{n}", marks=pytest.mark.slow) for n in (10, 11, 12, 13)),
    ],
)
def test_a_bare_python_reads_runs_and_names_what_else_is_needed(
    wheel: Path, tmp_path: Path, python: str
) -> None:
    if not is_usable(python):
        pytest.skip(f"{python} is not installed")
    environment = Environment(tmp_path, python=python)
    try:
        environment.pip("install", "--quiet", "--no-compile", wheel)
    except AssertionError as error:
        pytest.skip(f"packages cannot be installed here: {str(error)[-200:]}")
    run = planted_run(tmp_path)
    check_readers(environment, run)
    trainer = environment.tool("explain", "trainer.seed=1", status=2)
    assert trainer.startswith("verl-rc explain: it needs hydra, which comes with the trainer")


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="torch 2.6 has no build for this Python")
@pytest.mark.parametrize(
    "packages", [["torch==2.6.0"], ["trl==1.16.0", TORCH_OF_TODAY]], ids=["torch", "trl"]
)
def test_no_version_of_another_environment_moves(wheel: Path, tmp_path: Path, packages: list[str]) -> None:
    environment = Environment(tmp_path, packages)
    assert environment.moved_by(wheel) == []
    environment.pip("install", "--quiet", wheel)
    run = planted_run(tmp_path)
    check_readers(environment, run)
    environment.run("-c", CORRECTION)
