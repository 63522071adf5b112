"""Recipes as shell scripts: the shell expands them, nothing of them starts."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
from recipe_arguments import RECIPES, arguments_of

from verl_rc.config.verl import migration
from verl_rc.config.verl.migration import arguments_of_script, is_recipe_script

CALL = "python3 -m verl.trainer.main_ppo"


def script(folder: Path, *lines: str) -> str:
    path = folder / "run.sh"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_variables_arrays_conditions_and_further_arguments_are_the_shells(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "set -xeuo pipefail",
        "n=$((2 * 4))",
        "more=(a.b='[x, y]' a.c=${UNSET_HERE:-2})",
        'if [ "$n" = 8 ]; then lr=1e-6; else lr=1; fi',
        f'{CALL} a.n=$n a.lr=$lr "${{more[@]}}" "$@"',
    )
    assert arguments_of_script(path, ["z=1 2"]) == ["a.n=8", "a.lr=1e-6", "a.b=[x, y]", "a.c=2", "z=1 2"]


@pytest.mark.parametrize(
    "before", ["ray job submit --no-wait -- ", "nohup ", "env A=1 ", "CUDA_VISIBLE_DEVICES=0 ", "exec "]
)
def test_a_trainer_is_found_behind_what_starts_it(before: str, tmp_path: Path) -> None:
    assert arguments_of_script(script(tmp_path, f"{before}{CALL} a=1")) == ["a=1"]


def test_programs_called_by_name_do_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    quiet = [f"rm {kept}", f"touch {tmp_path}/new", "pip install nothing && mkdir -p a/b"]
    path = script(tmp_path, "set -e", *quiet, f"{CALL} a=1 | tee {tmp_path}/log")
    assert arguments_of_script(path) == ["a=1"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept", "run.sh"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [f"{CALL} a=1", f"{CALL} a=2"],
            "must start main_ppo once, but it starts verl.trainer.main_ppo, verl.trainer.main_ppo",
        ),
        (["torchrun -m verl.trainer.sft_trainer a=1"], "it starts verl.trainer.sft_trainer"),
        (["echo nothing"], "it starts nothing"),
        (["set -u", f"{CALL} a=$GHOST_OF_A_VARIABLE"], "GHOST_OF_A_VARIABLE: unbound variable"),
        (["if then"], "must be a script that a bash can run"),
    ],
)
def test_what_is_no_recipe_is_refused(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.sh must") as raised:
        arguments_of_script(script(tmp_path, *lines))
    assert message in str(raised.value)


def test_a_script_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        arguments_of_script("nowhere.sh")


@pytest.mark.parametrize(
    ("argument", "expected"), [("some/a.sh", True), ("data.custom=b.sh", False), ("run.yaml", False)]
)
def test_scripts_are_distinguished_from_overrides(argument: str, expected: bool) -> None:
    assert is_recipe_script(argument) is expected


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=lambda recipe: recipe.stem)
def test_our_recipes_say_what_they_say_to_python(recipe: Path) -> None:
    assert arguments_of_script(str(recipe), ["trainer.seed=5"]) == arguments_of(recipe, "trainer.seed=5")[2:]


def running(mark: str) -> list[str]:
    """Command lines of processes with this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if mark in words:
                found.append(" ".join(words))
    return found


BACKGROUND = (
    "{sleep} &",
    "nohup {sleep} > /dev/null 2>&1 &",
    "({sleep} &)",
    "( ( {sleep} & ) & )",
    "set -m; {sleep} &",
    "{sleep} & disown",
    "trap '' TERM HUP INT; {sleep} &",
    "{setsid} {sleep} &",
    "{setsid} -f {sleep}",
    "env -i {sleep} &",
    "(while true; do {sleep}; done) &",
)


@pytest.mark.parametrize(
    "goes_on", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ends", "goes on"]
)
@pytest.mark.parametrize("background", BACKGROUND)
def test_what_a_script_leaves_in_the_background_ends_with_it(
    background: str, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "_SECONDS_OF_BACKGROUND", 0.1)
    mark = f"{987_000 + os.getpid()}.{len(background)}"
    sleep = f"{shutil.which('sleep')} {mark}"
    line = background.format(sleep=sleep, setsid=shutil.which("setsid"))
    path = script(tmp_path, f"{CALL} a=1", line, *[f"{shutil.which('sleep')} 600"] * goes_on)
    if goes_on:
        monkeypatch.setattr(migration, "_SECONDS", 1)
        with pytest.raises(ValueError, match="must end by itself"):
            arguments_of_script(path)
    else:
        assert arguments_of_script(path) == ["a=1"]
    deadline = time.monotonic() + 120
    while (found := running(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)  # a killed process is there until it is reaped
    assert found == []


def test_a_trainer_in_the_background_is_recorded(tmp_path: Path) -> None:
    path = script(tmp_path, f"nohup {CALL} a=1 > /dev/null 2>&1 &")
    assert arguments_of_script(path) == ["a=1"]


def test_a_script_that_says_too_much_is_cut_off(tmp_path: Path) -> None:
    path = script(tmp_path, "while true; do printf '%01000000d\\n' 1; done >&2")
    with pytest.raises(ValueError, match="must be a script that a bash can run"):
        arguments_of_script(path)
