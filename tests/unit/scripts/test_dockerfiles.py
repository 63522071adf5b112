"""The images: pinned public bases, the project's own install script, nobody is root. (Syntax and style:
hadolint, by hand.)"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from recipe_arguments import arguments_of

from verl_rc.config.load import load_run_config

DOCKER = Path(__file__).parents[3] / "docker"
DEVICES = ("cpu", "gpu")
WORKDIR, CACHE = "/srv/verl_rc", "/srv/trainer/.cache"


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
    assert re.search(rf"useradd --create-home (--home-dir \S+ )?--uid {uid} trainer", setup)


@pytest.mark.parametrize("device", DEVICES)
def test_the_work_folder_belongs_to_the_user_before_it_is_entered(device):
    steps = dict(instructions(device))
    made = "install --directory --owner=trainer --group=trainer"
    assert steps["WORKDIR"] == WORKDIR
    assert f"{made} {WORKDIR}" in " ".join((DOCKER / f"Dockerfile.{device}").read_text().split())
    assert steps["COPY"] == "--chown=trainer:trainer . ."
    assert f"{WORKDIR}/.venv/bin" in steps["ENV"]


@pytest.mark.parametrize("device", DEVICES)
def test_what_scripts_ask_the_system_for_is_there(device):
    setup = instructions(device)[1][1]
    assert "libnuma1" in setup  # scripts/install.sh refuses a CPU without it
    assert "rm -rf /var/lib/apt/lists/*" in setup


def test_what_runs_write_and_environments_stay_out_of_the_images():
    ignored = (DOCKER / "Dockerfile.cpu.dockerignore").read_text()
    assert ignored == (DOCKER / "Dockerfile.gpu.dockerignore").read_text()
    assert {".venv*", ".git", "runs", "checkpoints", "data", "wandb"} <= set(ignored.splitlines())


def test_kernels_are_in_the_gpu_image_and_what_is_compiled_later_lies_where_a_volume_is_mounted():
    steps = instructions("gpu")
    assert steps.index(("RUN", "bash scripts/install.sh gpu")) < steps.index(("RUN", "vllm download-kernels"))
    assert f"TRITON_CACHE_DIR={CACHE}/triton" in dict(steps)["ENV"]
    home = CACHE.removesuffix("/.cache")
    assert f"--home-dir {home} " in steps[1][1]
    assert f" {CACHE}" in steps[1][1]  # belongs to the user, as a new volume does then


@pytest.fixture
def docker_calls(tmp_path):
    """The arguments of each call of docker by the commands of docs/cluster.md, which a shell runs here."""
    stub = tmp_path / "docker"
    stub.write_text(f"""#!/bin/sh\nprintf '%s\\n' "$@" >>{tmp_path}/calls\necho >>{tmp_path}/calls\n""")
    stub.chmod(0o755)
    page = (DOCKER.parent / "docs" / "cluster.md").read_text()
    (commands,) = re.findall(r"```bash\n(docker.*?)```", page, re.DOTALL)
    work = tmp_path / "checkout"
    work.mkdir()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", commands], cwd=work, env=environment, check=True)
    return work, [call.splitlines() for call in (tmp_path / "calls").read_text().split("\n\n") if call]


def test_the_documented_commands_mount_data_runs_and_caches(docker_calls):
    work, calls = docker_calls
    built = [call for call in calls if call[0] == "build"]
    assert [call[call.index("-f") + 1] for call in built] == [f"docker/Dockerfile.{name}" for name in DEVICES]
    images = {call[call.index("-t") + 1] for call in built}
    ran = [call for call in calls if call[0] == "run"]
    assert {next(word for word in call if word in images) for call in ran} == images
    for call in ran:
        image = next(index for index, word in enumerate(call) if word in images)
        script = next((word for word in call[image:] if "/" in word), None)
        if script is None:
            continue  # the image's own command, which makes its data
        assert (DOCKER.parent / script).is_file()
        mounts = {call[index + 1] for index, word in enumerate(call[:image]) if word == "-v"}
        needed = {f"{work}/data:{WORKDIR}/data", f"verl_rc_cache:{CACHE}"}
        if script.startswith("recipes/"):
            needed.add(f"{work}/runs:{WORKDIR}/runs")
            assert call[call.index("--gpus") + 1] == "all"
            assert any(word.startswith("--shm-size=") for word in call[:image])
        assert mounts == needed
    prepared = next(call[-1] for call in ran if "--output_dir" in call)
    (trained,) = [call[-1] for call in ran if call[-1].startswith("recipes/")]
    config = load_run_config(arguments_of(DOCKER.parent / trained)[2:])
    assert {str(Path(file).parent) for file in (*config.data.train_files, *config.data.val_files)} == {
        prepared
    }
    assert str(config.trainer.default_local_dir).startswith("runs/")
