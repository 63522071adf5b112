"""What the cluster's scripts hand to Ray, with a Ray and a Python that only write their arguments down."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from verl_rc.config.load import load_run_config
from verl_rc.trainer.cluster import ray_session

ROOT = Path(__file__).parents[4]
RECORDER = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" > "$RECORD"\nenv -0 > "$RECORD.env"\n'


@pytest.fixture
def checkout(tmp_path):
    """A copy of the scripts and recipes, in a folder with a space, whose environment has a recording
    ``ray``."""
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts" / "cluster", root / "scripts" / "cluster")
    shutil.copytree(ROOT / "recipes", root / "recipes")
    _executable(root / ".venv" / "bin" / "ray", RECORDER)
    address = "#!/usr/bin/env bash\nif [[ $1 == -c ]]; then echo 10.0.0.1; else\n"
    _executable(root / ".venv" / "bin" / "python", f"{address}{RECORDER}fi\n")
    return root


def _executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(checkout, script, *arguments, **settings):
    """Runs a script of the copy; returns what its last recorded command was given, its environment, and its
    output."""
    record = checkout.parent / "record"
    variables = {"PATH": os.environ["PATH"], "RECORD": str(record), **settings}
    command = ["bash", str(checkout / "scripts" / "cluster" / script), *arguments]
    result = subprocess.run(command, env=variables, cwd=checkout, capture_output=True, text=True, check=False)
    if result.returncode:
        return None, None, result.stderr
    environ = dict(item.split("=", 1) for item in Path(f"{record}.env").read_text().split("\0") if item)
    return record.read_text().split("\0")[:-1], environ, result.stdout


def submitted(checkout, recipe, *overrides, **settings):
    """The arguments that Python gets when the job that submit.sh hands to Ray is run."""
    arguments, _, _ = run(checkout, "submit.sh", recipe, *overrides, **settings)
    *_, bash, job = arguments
    assert bash == "bash"
    record = checkout.parent / "of_the_job"
    subprocess.run(
        ["bash", job], env={"PATH": os.environ["PATH"], "RECORD": str(record)}, cwd="/", check=True
    )
    environ = dict(item.split("=", 1) for item in Path(f"{record}.env").read_text().split("\0") if item)
    return record.read_text().split("\0")[:-1], environ


def test_the_head_listens_and_says_what_the_others_run(checkout):
    arguments, _, output = run(checkout, "start_head.sh", "--num-gpus=8", RAY_PORT="7000")
    assert arguments == [
        "start",
        "--head",
        "--port=7000",
        "--dashboard-host=127.0.0.1",
        "--dashboard-port=8265",
        "--num-gpus=8",
    ]
    assert "bash scripts/cluster/start_worker.sh 10.0.0.1:7000" in output


def test_a_worker_joins_the_head(checkout):
    arguments, _, _ = run(checkout, "start_worker.sh", "10.0.0.1:6379", "--num-gpus=8")
    assert arguments == ["start", "--address=10.0.0.1:6379", "--num-gpus=8"]


@pytest.mark.parametrize("script", ["start_head.sh", "start_worker.sh"])
def test_nodes_agree_with_the_driver_about_rays_settings(checkout, script, monkeypatch):
    for name in ray_session._RAY:
        monkeypatch.delenv(name, raising=False)
    _, environ, _ = run(checkout, script, "10.0.0.1:6379")
    of_the_driver_alone = {"RAY_DEDUP_LOGS"}
    wanted = {name: value for name, value in ray_session._RAY.items() if name not in of_the_driver_alone}
    assert {name: environ[name] for name in wanted} == wanted


def test_jobs_that_are_stopped_have_time_to_save(checkout):
    assert int(run(checkout, "start_head.sh")[1]["RAY_JOB_STOP_WAIT_TIME_S"]) > 600


def test_a_choice_of_authentication_is_kept(checkout):
    assert (
        run(checkout, "start_worker.sh", "10.0.0.1:6379", RAY_AUTH_MODE="token")[1]["RAY_AUTH_MODE"]
        == "token"
    )


def test_a_recipe_is_submitted_to_the_dashboard(checkout):
    arguments, _, _ = run(checkout, "submit.sh", "recipes/quickstart_digits_cpu.sh")
    assert arguments[:4] == ["job", "submit", "--address=http://127.0.0.1:8265", "--"]
    waiting, _, _ = run(
        checkout,
        "submit.sh",
        "recipes/quickstart_digits_cpu.sh",
        NO_WAIT="1",
        RAY_DASHBOARD_ADDRESS="http://h:1",
    )
    assert waiting[:5] == ["job", "submit", "--address=http://h:1", "--no-wait", "--"]


def test_the_job_runs_the_recipe_on_the_cluster_with_what_was_given(checkout):
    awkward = [
        "trainer.experiment_name=two words",
        "algorithm.rollout_correction.rollout_is_threshold={lower: 0.5, upper: 5.0}",
    ]
    arguments, environ = submitted(
        checkout, "recipes/math_qwen2.5_7b_token_is_8gpu.sh", *awkward, SEED="7", DATA_DIR="my data"
    )
    assert arguments[:2] == ["-m", "verl_rc.main_ppo"]
    config = load_run_config(arguments[2:])
    assert config.ray_kwargs.ray_init.address == "auto"
    assert config.trainer.experiment_name == "two words"
    assert str(config.algorithm.rollout_correction.rollout_is_threshold) == "0.5_5.0"
    assert (config.trainer.seed, config.data.train_files) == (7, ["my data/train.parquet"])
    assert Path(environ["PWD"]) == checkout


def test_a_dollar_and_quotes_reach_the_job_as_they_are(checkout):
    name = """trainer.experiment_name='it\\'s $HOME "`x`"'"""
    arguments, _ = submitted(checkout, "recipes/quickstart_digits_cpu.sh", name)
    assert arguments[-1] == name


def test_keys_are_not_passed_on(checkout):
    _, environ = submitted(
        checkout, "recipes/quickstart_digits_cpu.sh", WANDB_API_KEY="secret", WANDB_ENTITY="team"
    )
    assert "WANDB_API_KEY" not in environ
    assert environ["WANDB_ENTITY"] == "team"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (
            "start_worker.sh",
            [],
            "say where the head is: bash scripts/cluster/start_worker.sh HEAD_ADDRESS:6379",
        ),
        ("submit.sh", [], "say which recipe"),
        ("submit.sh", ["recipes/ghost"], "there is no recipe recipes/ghost"),
    ],
)
def test_what_is_missing_is_said(checkout, script, arguments, message):
    recorded, _, error = run(checkout, script, *arguments)
    assert recorded is None
    assert message in error


def test_without_an_installation_the_message_says_how_to_get_one(checkout):
    assert "bash scripts/install.sh gpu" in run(checkout, "submit.sh", VERL_RC_VENV="/nowhere")[2]
