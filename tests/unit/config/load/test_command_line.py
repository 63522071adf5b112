"""Hydra's options and overrides in any order, options that cannot be meant, and what the printing ones
print."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config, run_with_config
from verl_rc.config.load.command_line import config_file_options, parse
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of
from verl_rc.config.sft import SftConfig


def test_options_stand_anywhere_between_overrides(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    given = parse(["a=1", "-cn=run", "b=-2", "--config-dir", str(tmp_path), "~c", "-m", "d=x y"])
    assert given.overrides == ["a=1", "b=-2", "~c", "d=x y"]
    assert given.multirun
    assert config_file_options(given) == ["--config-name=run", f"--config-dir={tmp_path}"]
    assert parse(config_file_options(given)).config_dir == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--wrong", "options are --config-name, .* got '--wrong'"),
        ("--cfg none", "argument --cfg/-c: invalid choice: 'none'"),
        ("--config-name", "argument --config-name/-cn: expected one argument"),
        ("--cfg job --info", "at most one of --cfg, --info may be given"),
        ("--cfg job -m", "at most one of --cfg, --multirun may be given"),
        ("--resolve", "--resolve and --package belong to --cfg"),
        ("-p trainer", "--resolve and --package belong to --cfg"),
        ("--experimental-rerun x", "--experimental-rerun is refused"),
        ("--config-dir=nowhere", "--config-dir must name an existing folder, got 'nowhere'"),
        ("--config-path=nowhere", "--config-path must name an existing folder, got 'nowhere'"),
        ("--config-dir=.", "--config-dir must name a folder of .yaml files, but there is none in '.'"),
        ("data.shuffle", "an override must have the form key=value, got 'data.shuffle'"),
    ],
)
def test_what_cannot_be_meant(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as raised:
        parse(arguments.split())
    assert "\n" not in str(raised.value)


CHOSEN = ["task=digits", "hardware=cpu", "correction=decoupled_token_icepop"]
SECRET = "ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY"


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """Hydra's --info writes through logging, and leaves its handler behind."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield
    root.handlers, root.level = handlers, level


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """What a command line prints; no run may start."""

    def call(*arguments: str, schema=RunConfig, prog: str = "verl_rc.main_ppo") -> str:  # type: ignore[no-untyped-def]
        monkeypatch.setattr(sys, "argv", [prog, *arguments])
        run_with_config(schema, lambda _: pytest.fail("a run was started"), prog)
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_the_groups_and_where_to_read_on(printed, option: str) -> None:  # type: ignore[no-untyped-def]
    text = printed(option, *CHOSEN)
    for part in (
        "hardware: ",
        " cpu",
        "task: ",
        "digits",
        "decoupled_seq_is",
        "--config-dir",
        "reference.yaml",
        "verl-rc explain",
    ):
        assert part in text


def test_the_configuration_of_a_job_can_be_given_back(printed, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = printed(*CHOSEN, "trainer.seed=7", "--cfg", "job")
    tree = yaml.safe_load(text)
    assert list(tree) == list(RunConfig.model_fields)
    assert tree["algorithm"]["rollout_correction"]["rollout_is_threshold"] == "0.5_5.0"
    (tmp_path / "again.yaml").write_text(text)
    again = load_run_config([f"--config-dir={tmp_path}", "--config-name=again"])
    assert again == load_run_config([*CHOSEN, "trainer.seed=7"])


def test_without_arguments_every_key_is_shown_and_what_is_missing(printed) -> None:  # type: ignore[no-untyped-def]
    tree = yaml.safe_load(printed("--cfg=job"))
    for key in fields_of(RunConfig):
        value = tree
        for part in key.split("."):
            value = value[part]
    assert tree["actor_rollout_ref"]["model"]["path"] == "???"


def test_interpolations_are_resolved_only_when_asked_for(printed) -> None:  # type: ignore[no-untyped-def]
    given = ("trainer.experiment_name='${trainer.seed}'", "--cfg=job", "--package=trainer")
    assert "experiment_name: ${trainer.seed}\n" in printed(*given)
    assert "experiment_name: 1\n" in printed(*given, "--resolve")


def test_a_section_alone(printed) -> None:  # type: ignore[no-untyped-def]
    assert (
        yaml.safe_load(printed("-c", "job", "-p", "algorithm.kl_ctrl", "algorithm.kl_ctrl.kl_coef=0.5"))[
            "kl_coef"
        ]
        == 0.5
    )


def test_hydras_own_configuration(printed) -> None:  # type: ignore[no-untyped-def]
    tree = yaml.safe_load(printed(*CHOSEN, "--cfg", "hydra"))
    assert tree["hydra"]["runtime"]["choices"]["model"] == "tiny"
    assert set(tree["hydra"]["overrides"]["task"]) == set(CHOSEN)
    assert set(yaml.safe_load(printed(*CHOSEN, "--cfg=all"))) == {*RunConfig.model_fields, "hydra"}


@pytest.mark.parametrize("option", [["--cfg=all"], ["--cfg=all", "--resolve"], ["--info"]])
def test_secrets_are_hidden(
    printed, option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    for name in ("MY_SECRET", "HF_TOKEN", "WANDB_API_KEY", "OPENAI_KEY"):
        monkeypatch.setenv(name, "abc123")
    (tmp_path / "run.yaml").write_text(
        "ray_kwargs: {ray_init: {runtime_env: {env_vars: {HF_TOKEN: '${oc.env:MY_SECRET}', NCCL_DEBUG: "
        "INFO}}}}\n"
        "hydra: {job: {env_set: {DB_PASSWORD: abc123}}}\n"
    )
    rest = "ray_kwargs.ray_init.runtime_env.env_vars={OPENAI_KEY: abc123}"
    text = printed(f"--config-dir={tmp_path}", "--config-name=run", f"{SECRET}=abc123", rest, *option)
    assert "abc123" not in text
    assert text.count("NCCL_DEBUG: INFO") == 1


@pytest.mark.parametrize(
    ("info", "part"),
    [
        (["--info", "defaults"], "| task/digits"),
        (["--info", "defaults-tree"], "task: digits"),
        (["--info", "searchpath"], "verl_rc"),
        (["--info", "config"], "total_training_steps: 80"),
        (["--info", "plugins"], "BasicSweeper"),
        (["-i"], "Config search path"),
    ],
)
def test_info(printed, info: list[str], part: str) -> None:  # type: ignore[no-untyped-def]
    assert part in printed(*CHOSEN, *info)


def test_what_hydra_prints_about_itself(printed) -> None:  # type: ignore[no-untyped-def]
    assert "hydra.cc" in printed("--hydra-help")
    assert "complete" in printed("--shell-completion", "install=bash")


def test_sft_has_options_and_no_groups(printed) -> None:  # type: ignore[no-untyped-def]
    def sft(*arguments: str) -> str:
        return str(printed(*arguments, schema=SftConfig, prog="verl_rc.main_sft"))

    assert "Groups" not in sft("--help")
    assert "verl-rc explain" not in sft("--help")
    assert yaml.safe_load(sft("--cfg=job", "optim.lr=3"))["optim"]["lr"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cfg=job", "task=digit"], "task must be one of "),
        (["--cfg=job", "trainer.sed=1"], "the nearest is trainer.seed"),
        (["--cfg=job", "trainer.seed=1,2"], "trainer.seed"),
        (["--info", "config", "--config-name=nowhere"], "Cannot find primary config 'nowhere'"),
        (["--cfg=job", "-p", "ghost"], "ghost"),
    ],
)
def test_mistakes_end_with_2_or_1_and_a_sentence(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["verl_rc.main_ppo", *arguments])
    with pytest.raises(SystemExit) as raised:
        run_with_config(RunConfig, lambda _: None, "verl_rc.main_ppo")
    error = capsys.readouterr().err
    assert (raised.value.code, message in error, "Traceback" in error) == (
        1 if "ghost" in arguments else 2,
        True,
        False,
    )
