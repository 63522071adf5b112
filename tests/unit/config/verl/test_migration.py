"""verl's overrides and run files, translated; legacy keys given to a run are refused with their
translation."""

from pathlib import Path

import pytest

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.config.verl.migration import Migration, arguments_of_script, is_correction_key, migrate

SECTION = "algorithm.rollout_correction"
REST = [
    "data.train_files=a.parquet",
    "data.val_files=b.parquet",
    "actor_rollout_ref.model.path=org/model",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
]


def test_a_cap_of_the_first_release_becomes_token_weights() -> None:
    migration = migrate(["actor_rollout_ref.actor.tis_imp_ratio_cap=2.5", "trainer.nnodes=2"])
    assert set(migration.overrides) == {
        "trainer.nnodes=2",
        f"{SECTION}.rollout_is=token",
        f"{SECTION}.rollout_is_threshold=2.5",
    }
    assert any("era A" in note for note in migration.notes)


@pytest.mark.parametrize(
    ("settings", "era", "overrides"),
    [
        (
            [
                "algorithm.rollout_is=True",
                "algorithm.rollout_is_level=sequence",
                "algorithm.rollout_is_mode=truncate",
                "algorithm.rollout_is_threshold=2.0",
            ],
            "B3",
            ["rollout_is=sequence", "rollout_is_threshold=2.0"],
        ),
        (
            [f"{SECTION}.rollout_is=sequence", f"{SECTION}.bypass_old_logprob_for_rollout=True"],
            "C",
            ["bypass_mode=True", "rollout_is=sequence"],
        ),
        (
            [f"{SECTION}.rollout_rs=seq_mean_k1", f"{SECTION}.rollout_rs_threshold=0.99_1.001"],
            "D",
            ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.99_1.001"],
        ),
    ],
)
def test_settings_of_a_release_become_todays_and_load(
    settings: list[str], era: str, overrides: list[str]
) -> None:
    migration = migrate(settings)
    assert set(overrides) <= {override.removeprefix(f"{SECTION}.") for override in migration.overrides}
    assert f"read as settings of era {era}" in " ".join(migration.notes)
    load_run_config([*REST, *migration.overrides])


def test_what_comes_out_runs() -> None:
    migration = migrate(
        [
            *REST,
            "actor_rollout_ref.actor.grad_clip=0.5",
            "+algorithm.rollout_is=True",
            "algorithm.rollout_is_threshold=3",
        ]
    )
    config = load_run_config([*migration.overrides, "actor_rollout_ref.rollout.n=2"])
    assert config.actor_rollout_ref.actor.optim.clip_grad == 0.5
    assert config.algorithm.rollout_correction.rollout_is_threshold == 3.0


def test_a_run_file_is_read_like_overrides_and_bounds_may_be_inverse(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        'algorithm:\n  rollout_correction:\n    rollout_rs: seq_mean_k1\n    rollout_rs_threshold: "0.5_4.0"\n'  # noqa: E501
        "critic:\n  enable: true\n"
    )
    migration = migrate([str(tmp_path / "run.yaml")], {"k1_bound_convention": "inverse"})
    assert "critic.enable=True" in migration.overrides
    assert f"{SECTION}.rollout_rs_threshold=0.25_2.0" in migration.overrides


def test_a_shell_script_of_verl_becomes_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "verl.sh").write_text(
        "set -x\nMODEL=org/model\npython3 -m verl.trainer.main_ppo --config-path=config "
        "--config-name=ppo_trainer \\\n"
        "  actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.grad_clip=0.5 \\\n"
        '  +algorithm.rollout_is=True algorithm.rollout_is_threshold=3 trainer.logger=\'["console","wandb"]\' $@\n'  # noqa: E501
    )
    migration = migrate([str(tmp_path / "verl.sh"), "trainer.nnodes=2"])
    (tmp_path / "recipe.sh").write_text(migration.recipe())
    assert arguments_of_script(str(tmp_path / "recipe.sh"), ["trainer.seed=3"]) == [
        "actor_rollout_ref.model.path=org/model",
        "actor_rollout_ref.actor.optim.clip_grad=0.5",
        "trainer.logger=['console', 'wandb']",
        "trainer.nnodes=2",
        f"{SECTION}.rollout_is=token",
        f"{SECTION}.rollout_is_threshold=3.0",
        "trainer.seed=3",
    ]


@pytest.mark.parametrize("override", ["a=1", "a=['b', 'c']", "a='$HOME' \"b\"", "a=b c", "a=!x'", "a=`x`'"])
def test_a_recipe_hands_over_what_it_was_given(override: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.sh").write_text(Migration([override], []).recipe())
    assert arguments_of_script(str(tmp_path / "recipe.sh")) == [override]


def test_keys_that_verl_itself_never_reads_are_said() -> None:
    grouper = "actor_rollout_ref.actor.use_prefix_grouper"
    migration = migrate([f"{grouper}=True", "actor_rollout_ref.actor.freeze_vision_tower=False"])
    assert sorted(migration.overrides) == [
        "actor_rollout_ref.actor.freeze_vision_tower=False",
        "actor_rollout_ref.model.share_prefixes=True",
    ]
    dead = [note for note in migration.notes if note.endswith("has the key and never reads it.")]
    assert [note.partition(":")[0] for note in dead] == [
        "actor_rollout_ref.actor.freeze_vision_tower",
        grouper,
    ]


def test_the_actors_copy_of_the_correction_is_the_correction() -> None:
    copy = "actor_rollout_ref.actor.policy_loss.rollout_correction"
    given = [f"{copy}.rollout_is=token", f"{copy}.rollout_is_threshold=0.5_5"]
    assert migrate(given) == migrate([pair.replace(copy, SECTION) for pair in given])


def test_what_is_refused_is_left_out_and_said() -> None:
    migration = migrate(["data.use_shm=True", "data.return_raw_chat=True"])
    assert migration.overrides == []
    assert len(migration.notes) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=2"], f"{SECTION}.rollout_is=token"),
        ([f"{SECTION}.bypass_old_logprob_for_rollout=True"], f"{SECTION}.bypass_mode=True"),
        (["+algorithm.rollout_is=True", "algorithm.rollout_is_threshold=2"], f"{SECTION}.rollout_is=token"),
        (["algorithm.rollout_is_level=tokenn", "algorithm.rollout_is_threshold=2"], "cannot be translated"),
    ],
)
def test_a_legacy_key_given_to_a_run_is_refused_with_its_translation(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config([*REST, *overrides])
    assert message in str(caught.value)
    assert "earlier verl release" in str(caught.value)


def test_todays_keys_are_no_legacy() -> None:
    assert is_correction_key(f"{SECTION}.rollout_is")
    assert not is_correction_key("algorithm.adv_estimator")
    assert not is_correction_key("actor_rollout_ref.actor.policy_loss.loss_mode")


@pytest.mark.parametrize("argument", ["nowhere.yaml", "just_a_word"])
def test_what_is_neither_override_nor_file_is_refused(argument: str) -> None:
    with pytest.raises(ValueError, match="must be key=value, a YAML file or a shell script"):
        migrate([argument])
