"""Every recipe is a valid configuration: what its shell passes to Python loads, also with a further override."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from verl_rc.config.load import load_run_config

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.sh"))


@pytest.fixture
def given_arguments(tmp_path):
    """Runs a recipe with a Python that only writes its arguments down, and returns them."""
    record, stub = tmp_path / "arguments", tmp_path / "python"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" > "$ARGUMENTS_FILE"\n')
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)

    def run(recipe, *further, **settings):
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(stub), "ARGUMENTS_FILE": str(record), **settings}
        subprocess.run(["bash", str(recipe), *further], env=environment, cwd=tmp_path, check=True)
        return record.read_text().split("\0")[:-1]

    return run


def test_there_are_recipes():
    assert {"quickstart_digits_cpu.sh", "gsm8k_qwen2.5_0.5b_1gpu.sh"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_a_valid_configuration(recipe, given_arguments):
    flag, module, *overrides = given_arguments(recipe)
    assert (flag, module) == ("-m", "verl_rc.main_ppo")
    load_run_config(overrides)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_settings_and_further_overrides_arrive(recipe, given_arguments):
    settings = {"MODEL_PATH": "/models/a b", "DATA_DIR": "/data", "RUN_DIR": "/runs/1", "SEED": "7"}
    overrides = given_arguments(recipe, "trainer.total_training_steps=3", **settings)[2:]
    config = load_run_config(overrides)
    assert config.actor_rollout_ref.model.path == "/models/a b"
    assert config.data.train_files == ["/data/train.parquet"]
    assert (config.trainer.default_local_dir, config.trainer.seed, config.trainer.total_training_steps) == ("/runs/1", 7, 3)


def test_the_gsm8k_recipe_makes_four_updates_of_512_samples(given_arguments):
    overrides = given_arguments(ROOT / "recipes" / "gsm8k_qwen2.5_0.5b_1gpu.sh")[2:]
    config = load_run_config(overrides)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.data.train_batch_size // actor.ppo_mini_batch_size == 4
    assert actor.ppo_mini_batch_size * rollout.n == 512
    assert config.algorithm.rollout_correction.rollout_is == "sequence"
    assert (config.trainer.device, config.num_ranks, config.num_engines) == ("cuda", 1, 1)


def test_the_gsm8k_recipe_fits_a_smaller_gpu_as_its_header_says(given_arguments):
    recipe = ROOT / "recipes" / "gsm8k_qwen2.5_0.5b_1gpu.sh"
    smaller = re.search(r"24 GiB of GPU memory pass\n# (.*)\.\n", recipe.read_text())[1].split()
    actor_rollout = load_run_config(given_arguments(recipe, *smaller)[2:]).actor_rollout_ref
    assert (actor_rollout.actor.ppo_max_token_len_per_gpu, actor_rollout.rollout.gpu_memory_utilization) == (4096, 0.35)


def test_a_recipe_with_a_wrong_key_would_be_caught(given_arguments):
    overrides = given_arguments(RECIPES[0], "actor_rollout_ref.rollout.no_such_key=1")[2:]
    with pytest.raises(ValueError, match="no_such_key is not a known key"):
        load_run_config(overrides)
