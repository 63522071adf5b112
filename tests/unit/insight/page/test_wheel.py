"""An installed package writes pages too: the wheel has the page's files, and needs no checkout beside it."""

import os
import subprocess
import sys
import zipfile

import pytest
from built_wheel import build_wheel
from planted_series import healthy, write_run
from small_runs import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_has_every_file_of_the_page(installed):
    here, there = ROOT / "verl_rc/insight/page/assets", installed / "verl_rc/insight/page/assets"
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in here.iterdir()
    }


def test_an_installed_package_writes_a_page(installed, tmp_path):
    folder = write_run(tmp_path / "run", healthy(steps=3))
    command = [sys.executable, "-m", "verl_rc.cli", "report", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "uPlot" in (folder / "report.html").read_text()
