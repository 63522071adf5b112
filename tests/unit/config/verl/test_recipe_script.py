"""Recipes as shell scripts: the shell expands them, nothing of them starts."""

from pathlib import Path

import pytest
from recipe_arguments import RECIPES, arguments_of

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
