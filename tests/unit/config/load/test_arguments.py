"""Hydra's options and overrides in any order, and options that cannot be meant."""

from pathlib import Path

import pytest

from verl_rc.config.errors import ConfigError
from verl_rc.config.load.command_line import parse, sources_of


def test_options_stand_anywhere_between_overrides(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    given = parse(["a=1", "-cn=run", "b=-2", "--config-dir", str(tmp_path), "~c", "-m", "d=x y"])
    assert given.overrides == ["a=1", "b=-2", "~c", "d=x y"]
    assert given.multirun
    assert sources_of(given) == ["--config-name=run", f"--config-dir={tmp_path}"]
    assert parse(sources_of(given)).config_dir == str(tmp_path)


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
def test_what_cannot_be_meant(arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as raised:
        parse(arguments.split())
    assert "\n" not in str(raised.value)
