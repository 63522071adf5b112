"""Raw overrides: what becomes of them, and which are refused by name."""

from pathlib import Path

import pytest

from verl_rc.config.errors import ConfigError
from verl_rc.config.load.arguments import parse
from verl_rc.config.load.compose import Composer
from verl_rc.config.load.overrides import Prepared, check_keys, prepare
from verl_rc.config.run import RunConfig
from verl_rc.config.sft import SftConfig

CORRECTION = "algorithm.rollout_correction"


def prepared(*overrides: str, options: tuple[str, ...] = ()) -> Prepared:
    return prepare(RunConfig, Composer(parse(options), has_groups=True), overrides)


def test_groups_and_keys_are_told_apart(tmp_path: Path) -> None:
    found = prepared("trainer.seed=1", "task=digits", "+data.shuffle=False", "hydra.searchpath=[a]", "~trainer.nnodes", "~model")
    assert found.of_files == ["hydra.searchpath=[a]", "task=digits", "~model"]
    assert found.keys == ["++trainer.seed=1", "++data.shuffle=False", "~trainer.nnodes"]


@pytest.mark.parametrize(
    ("override", "rewritten"),
    [
        (f"{CORRECTION}.rollout_rs=a,b", f"++{CORRECTION}.rollout_rs='a,b'"),
        (f"{CORRECTION}.rollout_is_threshold=0.5_5", f"++{CORRECTION}.rollout_is_threshold='0.5_5'"),
        (f"{CORRECTION}.rollout_is_threshold=choice(1,2)", f"++{CORRECTION}.rollout_is_threshold=choice(1,2)"),
        (f"{CORRECTION}.rollout_is_threshold=null", f"++{CORRECTION}.rollout_is_threshold=null"),
        (f"{CORRECTION}.preset=a,b", f"++{CORRECTION}.preset=a,b"),
        ("trainer.logger=\"['console']\"", "++trainer.logger=['console']"),
        ("trainer.default_local_dir=~/runs", "++trainer.default_local_dir='~/runs'"),
    ],
)
def test_values_are_read_as_they_were_meant(override: str, rewritten: str) -> None:
    assert prepared(override).keys == [rewritten]
    assert prepared(rewritten).keys == [rewritten]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("harware=cpu", r"harware is not a known key or config group; the nearest is the group hardware of async, .*task\."),
        ("tasks/digits=x", "tasks/digits is not a known key or config group; the nearest is the group task of"),
        ("trainr.seed=1", "the nearest is trainer.seed"),
        ("trainr=1", "trainr is not a known key"),
        ("hydra.run.dir=x", "hydra.run.dir=x is refused: a run's files go to trainer.default_local_dir"),
        ("hydra/launcher=joblib", "hydra/launcher=joblib is refused"),
    ],
)
def test_what_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        prepared(override)
    assert "\n" not in str(raised.value)


def test_sft_knows_no_groups() -> None:
    with pytest.raises(ConfigError, match="task is not a known key"):
        prepare(SftConfig, Composer(parse([]), has_groups=False), ["task=digits"])


def test_keys_of_files() -> None:
    check_keys(RunConfig, {"trainer": {"seed": 1}, "data": {"apply_chat_template_kwargs": {"x": {"y": 1}}}})
    with pytest.raises(ConfigError, match=r"trainer\.sed is not a known key"):
        check_keys(RunConfig, {"trainer": {"sed": 1}})
