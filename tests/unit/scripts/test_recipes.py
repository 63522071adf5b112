"""Every recipe is a valid configuration, does what it is called after, and sets nothing that has no
effect."""

import re
import subprocess
from pathlib import Path

import pytest
import ray
from recipe_arguments import RECIPES, ROOT, arguments_of

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.plan.explain import plan_text
from verl_rc.plan.memory import (
    ModelShape,
    TowerShape,
    choose_gradient_sums,
    estimate_roles,
    gpu_peaks,
    model_paths,
)
from verl_rc.trainer.cluster import placement
from verl_rc.trainer.cluster.placement import plan_placement

FOR_GPUS = [recipe for recipe in RECIPES if re.search(r"\dgpu\.sh$", recipe.name)]
CORRECTION = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"

MEANT = {
    "math_qwen2.5_7b_token_is_8gpu": {
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_is_threshold": 2.0,
    },
    "math_qwen2.5_7b_seq_is_rs_8gpu": {
        f"{CORRECTION}.rollout_is": "sequence",
        f"{CORRECTION}.rollout_rs": "seq_sum_k1",
    },
    "math_qwen2.5_7b_multi_rs_8gpu": {
        f"{CORRECTION}.rollout_rs": "token_k1,seq_max_k2",
        f"{CORRECTION}.rollout_rs_threshold": "0.6_1.6,2.5",
        f"{CORRECTION}.loss_type": "ppo_clip",
    },
    "math_qwen2.5_7b_geo_rs_8gpu": {
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_rs": "seq_mean_k1",
        f"{CORRECTION}.rollout_rs_threshold": "0.99_1.01",
    },
    "math_qwen2.5_7b_bypass_pg_8gpu": {
        f"{CORRECTION}.bypass_mode": True,
        f"{CORRECTION}.loss_type": "reinforce",
        "algorithm.adv_estimator": "rloo",
    },
    "math_qwen3_8b_gspo_8gpu": {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.clip_ratio_high": 4e-4},
    "math_qwen3_8b_cispo_8gpu": {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_high": 5.0},
    "math_qwen3_30b_a3b_8gpu": {
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
        f"{CORRECTION}.rollout_is": "token",
    },
    "math_gpt_oss_20b_8gpu": {
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": False,
        f"{CORRECTION}.rollout_is": "token",
    },
    "math_gemma3_1b_8gpu": {f"{CORRECTION}.rollout_is": "token"},
    "geo3k_qwen2.5_vl_7b_8gpu": {
        f"{CORRECTION}.rollout_is": "token",
        f"{ACTOR}.freeze_vision_tower": True,
    },
    "math_qwen2.5_7b_rloo_8gpu": {"algorithm.adv_estimator": "rloo", "algorithm.use_kl_in_reward": True},
    "math_qwen2.5_7b_reinforce_plus_plus_8gpu": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "math_qwen2.5_7b_dr_grpo_8gpu": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor": 4096,
    },
    "math_qwen2.5_7b_async_2x8gpu": {
        f"{CORRECTION}.rollout_is": "token",
        "async_training.staleness_threshold": 1.0,
        "async_training.partial_rollout": False,
        "actor_rollout_ref.hybrid_engine": False,
    },
    "ppo_qwen2.5_32b_token_is_4x8gpu": {
        "algorithm.adv_estimator": "gae",
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_is_threshold": 10.0,
        "num_ranks": 32,
        "num_engines": 8,
        "needs_critic": True,
    },
    "dapo_qwen2.5_32b_rollout_corr_16x8gpu": {
        "algorithm.filter_groups.enable": True,
        f"{ACTOR}.clip_ratio_high": 0.28,
        f"{CORRECTION}.rollout_is": "sequence",
        f"{CORRECTION}.rollout_rs_threshold": "0.99_1.01",
        "reward.reward_kwargs.overlong_buffer_cfg.len": 4096,
        "num_ranks": 128,
        "num_engines": 32,
    },
}
"""What recipes for GPUs must come to, by the method they are named after."""


@pytest.fixture(scope="module")
def configs():
    return {recipe.name.removesuffix(".sh"): load_run_config(arguments_of(recipe)[2:]) for recipe in RECIPES}


def test_there_are_recipes():
    assert {"quickstart_digits_cpu.sh", "gsm8k_qwen2.5_0.5b_1gpu.sh"} <= {path.name for path in RECIPES}
    assert set(MEANT) == {path.name.removesuffix(".sh") for path in FOR_GPUS} - {"gsm8k_qwen2.5_0.5b_1gpu"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_a_valid_configuration(recipe, configs):
    assert arguments_of(recipe)[:2] == ["-m", "verl_rc.main_ppo"]
    assert recipe.name.removesuffix(".sh") in configs


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_settings_and_further_overrides_arrive(recipe):
    settings = {"MODEL_PATH": "/models/a b", "DATA_DIR": "/data", "RUN_DIR": "/runs/1", "SEED": "7"}
    overrides = arguments_of(recipe, "trainer.total_training_steps=3", **settings)[2:]
    config = load_run_config(overrides)
    assert config.actor_rollout_ref.model.path == "/models/a b"
    assert config.data.train_files == ["/data/train.parquet"]
    assert (config.trainer.default_local_dir, config.trainer.seed, config.trainer.total_training_steps) == (
        "/runs/1",
        7,
        3,
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_nothing_that_a_recipe_sets_is_without_effect(recipe, configs):
    assert "Set, and without effect" not in plan_text(configs[recipe.name.removesuffix(".sh")])


@pytest.mark.parametrize("name", MEANT)
def test_a_recipe_for_gpus_trains_what_it_is_called_after(name, configs):
    config = configs[name]
    for key, expected in MEANT[name].items():
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        assert (str(value) if isinstance(expected, str) else value) == expected, key
    assert config.trainer.device == "cuda"


def test_recipes_write_to_folders_and_names_of_their_own(configs):
    for names in (
        [config.trainer.default_local_dir for config in configs.values()],
        [(config.trainer.project_name, config.trainer.experiment_name) for config in configs.values()],
    ):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("recipe", FOR_GPUS, ids=lambda path: path.name)
def test_the_head_says_what_is_needed_and_what_to_expect(recipe):
    head = recipe.read_text().split("set -euo pipefail")[0]
    assert "# Hardware" in head
    if recipe.name != "gsm8k_qwen2.5_0.5b_1gpu.sh":
        assert "# Method: " in head
        assert "# Expect: " in head
        assert "ever run here." in " ".join(head.replace("#", "").split())


def test_several_nodes_join_a_running_cluster(configs):
    for name, config in configs.items():
        own_nodes = 0 if config.actor_rollout_ref.hybrid_engine else config.actor_rollout_ref.rollout.nnodes
        several = config.trainer.device == "cuda" and config.trainer.nnodes + own_nodes > 1
        assert (config.ray_kwargs.ray_init.address == "auto") == several, name


class ReservedError(Exception):
    """All checks passed, and places were asked for."""


@pytest.fixture
def start_on(monkeypatch):
    """Start a configuration on a cluster whose nodes have so many GPUs each."""

    def reserve(*_, **__):
        raise ReservedError

    def start(config, gpus):
        nodes = [{"Alive": True, "Resources": {"CPU": 64.0, "GPU": float(count)}} for count in gpus]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": float(sum(gpus))})
        plan_placement(config)

    monkeypatch.setattr(placement, "placement_group", reserve)
    return start


@pytest.mark.parametrize("recipe", FOR_GPUS, ids=lambda path: path.stem)
def test_a_recipe_is_placed_on_the_nodes_in_its_name_and_says_what_fits_fewer(recipe, configs, start_on):
    """On a node less, or a GPU less on one node, the keys that the message names are placed there."""
    nodes, each = re.fullmatch(r".*?(?:(\d+)x)?(\d+)gpu", recipe.stem).groups()
    gpus = [int(each)] * int(nodes or 1)
    with pytest.raises(ReservedError):
        start_on(configs[recipe.stem], gpus)
    for fewer in (gpus[1:], [*gpus[1:], gpus[0] - 1]):
        with pytest.raises(ConfigError) as refusal:
            start_on(configs[recipe.stem], fewer)
        named = re.findall(r"[\w.]+\.(?:nnodes|n_gpus_per_node)=\d+(?= |,|\.$)", str(refusal.value))
        if "n_gpus_per_node=" in "".join(named):
            with pytest.raises(ReservedError):
                start_on(load_run_config(arguments_of(recipe, *named)[2:]), fewer)
        else:
            assert sum(fewer) < len(gpus) or "Lower trainer.nnodes" in str(refusal.value)


def test_the_asynchronous_recipe_fits_one_node_as_its_head_says(configs, start_on):
    recipe = ROOT / "recipes" / "math_qwen2.5_7b_async_2x8gpu.sh"
    given = re.search(r"without a cluster: pass\n# (.*)\.\n", recipe.read_text())[1].split()
    config = load_run_config(arguments_of(recipe, *given)[2:])
    assert config.ray_kwargs.ray_init.address is None
    with pytest.raises(ReservedError):
        start_on(config, [8])
    local = load_run_config(arguments_of(recipe, "ray_kwargs.ray_init.address=null")[2:])
    with pytest.raises(ConfigError, match=r"Pass ray_kwargs\.ray_init\.address=auto where a cluster"):
        start_on(local, [8])


@pytest.mark.parametrize("name", ["ppo_qwen2.5_32b_token_is_4x8gpu", "dapo_qwen2.5_32b_rollout_corr_16x8gpu"])
def test_the_number_of_nodes_is_a_setting(name):
    assert load_run_config(arguments_of(ROOT / "recipes" / f"{name}.sh", NNODES="2")[2:]).num_ranks == 16


def test_the_gsm8k_recipe_makes_four_updates_of_512_samples(configs):
    config = configs["gsm8k_qwen2.5_0.5b_1gpu"]
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.data.train_batch_size // actor.ppo_mini_batch_size == 4
    assert actor.ppo_mini_batch_size * rollout.n == 512
    assert config.algorithm.rollout_correction.rollout_is == "sequence"
    assert (config.trainer.device, config.num_ranks, config.num_engines) == ("cuda", 1, 1)


@pytest.mark.parametrize(
    ("name", "room", "expected"),
    [
        ("gsm8k_qwen2.5_0.5b_1gpu.sh", "With 24 GB", (4096, 0.35)),
        ("math_qwen2.5_7b_token_is_8gpu.sh", "With 40 GB a GPU", (6144, 0.5)),
    ],
)
def test_a_recipe_fits_smaller_gpus_as_its_head_says(name, room, expected):
    recipe = ROOT / "recipes" / name
    smaller = re.search(rf"{room} pass\n# (.*)\.\n", recipe.read_text())[1].split()
    actor_rollout = load_run_config(arguments_of(recipe, *smaller)[2:]).actor_rollout_ref
    assert (
        actor_rollout.actor.ppo_max_token_len_per_gpu,
        actor_rollout.rollout.gpu_memory_utilization,
    ) == expected


def test_the_engines_of_the_asynchronous_recipe_use_the_gpus_that_are_theirs(configs):
    """Not the 60 % of engines that share them."""
    shared = configs["math_qwen2.5_7b_token_is_8gpu"].actor_rollout_ref.rollout.gpu_memory_utilization
    assert (
        configs["math_qwen2.5_7b_async_2x8gpu"].actor_rollout_ref.rollout.gpu_memory_utilization
        > shared + 0.1
    )


def test_a_recipe_with_a_wrong_key_would_be_caught():
    overrides = arguments_of(RECIPES[0], "actor_rollout_ref.rollout.no_such_key=1")[2:]
    with pytest.raises(ValueError, match="no_such_key is not a known key"):
        load_run_config(overrides)


def test_a_recipe_that_fails_would_be_noticed(tmp_path):
    broken = tmp_path / "broken.sh"
    broken.write_text("set -euo pipefail\nfalse\n")
    with pytest.raises(subprocess.CalledProcessError):
        arguments_of(broken)


SHAPES = {
    "vl-7b": ModelShape(
        8_292_166_656,
        1_089_994_752,
        0,
        28,
        3584,
        152_064,
        128_000,
        key_width=1024,
        tower=TowerShape(32, 1280, 4, 1176),
    ),
    "0.5b": ModelShape(494_032_768, 136_134_656, 0, 24, 896, 151_936, 32_768),
    "7b": ModelShape(7_615_616_512, 1_089_994_752, 0, 28, 3584, 152_064, 131_072),
    "8b": ModelShape(8_190_735_360, 1_244_659_712, 0, 36, 4096, 151_936, 40_960),
    "30b": ModelShape(
        30_532_122_624,
        622_329_856,
        0,
        48,
        2048,
        151_936,
        40_960,
        recomputed_bytes=36 + 11 * 8 + 9.3 * 8 * 768 / 2048,
    ),
    "32b": ModelShape(32_763_876_352, 1_557_135_360, 0, 64, 5120, 152_064, 131_072),
    "20b": ModelShape(
        20_914_757_184,
        1_158_266_880,
        0,
        24,
        2880,
        201_088,
        131_072,
        recomputed_bytes=36 + 11 * 4 + 9.3 * 4,
        key_width=1024,
    ),
    "1b": ModelShape(999_885_952, 301_989_888, 0, 26, 1152, 262_144, 32_768, key_width=512),
}
"""Of Qwen2.5, Qwen2.5-VL, Qwen3 (8b and 30b), gpt-oss (20b) and Gemma 3 (1b), by their published
configurations."""


@pytest.mark.parametrize("recipe", FOR_GPUS, ids=lambda recipe: recipe.stem)
def test_a_recipe_fits_on_its_gpus_and_says_how_much_of_them_it_takes(recipe: Path) -> None:
    """In the estimate of memory; one that did not would have to be withdrawn."""
    config = load_run_config(arguments_of(recipe)[2:])
    shapes = {
        path: next(shape for size, shape in SHAPES.items() if size in path.lower())
        for path in model_paths(config)
    }
    gpu_bytes = int((39.4 if recipe.stem.endswith("_1gpu") else 79.1) * (1 << 30))
    decided, _ = choose_gradient_sums(config, shapes, gpu_bytes)
    peaks = gpu_peaks(decided, estimate_roles(decided, shapes, gpu_bytes))
    assert max(peaks.values()) < 0.9 * gpu_bytes
    header = " ".join(line.lstrip("# ") for line in recipe.read_text().splitlines() if line.startswith("#"))
    stated = re.search(r"Estimated: (\d+) GiB a GPU in an update.*?, (\d+) GiB while engines sample", header)
    if stated is None:
        assert "as recipes/" in header or "of recipes/" in header  # which it calls
    else:
        assert [int(number) for number in stated.groups()] == [
            round(peak / (1 << 30)) for peak in peaks.values()
        ]
