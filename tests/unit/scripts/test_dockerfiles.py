"""The images: pinned public bases, the project's own install script, nobody is root. (Syntax and style:
hadolint, by hand.)"""

import re
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[3] / "docker"
DEVICES = ("cpu", "gpu")


def instructions(device):
    """``(instruction, rest)`` of every instruction, lines that are continued joined."""
    text = (DOCKER / f"Dockerfile.{device}").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


@pytest.mark.parametrize("device", DEVICES)
def test_the_base_is_public_and_has_a_full_version(device):
    ((_, base),) = [item for item in instructions(device) if item[0] == "FROM"]
    assert re.fullmatch(r"(python:\d+\.\d+\.\d+|nvidia/cuda:\d+\.\d+\.\d+)-[a-z0-9.-]+", base)


@pytest.mark.parametrize("device", DEVICES)
def test_it_installs_with_the_projects_script_and_not_as_root(device):
    steps = instructions(device)
    user = next(index for index, (name, _) in enumerate(steps) if name == "USER")
    install = steps.index(("RUN", f"bash scripts/install.sh {device}"))
    assert user < install
    uid = steps[user][1]
    assert uid.isdecimal()
    assert int(uid) >= 1000
    setup = steps[1][1]
    assert f"useradd --create-home --uid {uid} trainer" in setup


@pytest.mark.parametrize("device", DEVICES)
def test_the_work_folder_belongs_to_the_user_before_it_is_entered(device):
    steps = dict(instructions(device))
    made = "install --directory --owner=trainer --group=trainer"
    assert f"{made} {steps['WORKDIR']}" in " ".join((DOCKER / f"Dockerfile.{device}").read_text().split())
    assert steps["COPY"] == "--chown=trainer:trainer . ."
    assert f"{steps['WORKDIR']}/.venv/bin" in steps["ENV"]


@pytest.mark.parametrize("device", DEVICES)
def test_what_scripts_ask_the_system_for_is_there(device):
    setup = instructions(device)[1][1]
    assert "libnuma1" in setup  # scripts/install.sh refuses a CPU without it
    assert "rm -rf /var/lib/apt/lists/*" in setup


def test_what_runs_write_and_environments_stay_out_of_the_images():
    ignored = (DOCKER / "Dockerfile.cpu.dockerignore").read_text()
    assert ignored == (DOCKER / "Dockerfile.gpu.dockerignore").read_text()
    assert {".venv*", ".git", "runs", "checkpoints", "data", "wandb"} <= set(ignored.splitlines())
