"""What the trainer runs for a method is what the exact track judges; conditions share the runs of studies."""

from pathlib import Path

import pytest
from evidence.studies import CORRECTIONS, STUDIES

from verl_rc.bench.method import find_method
from verl_rc.bench.standing import known_methods
from verl_rc.config.load import load_run_config
from verl_rc.ppo.choices import policy_loss_name
from verl_rc.study.runs import folder_of, planned
from verl_rc.study.tracks import CONTROL, TRACKS, overrides_of

PLACES = ("actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v")


def own_weight(rollout_log_probs):
    return rollout_log_probs


def own_loss(inputs):
    return inputs.reduce(inputs.log_probs), {}


def loaded(method: str):
    return load_run_config(["task=digits", "hardware=cpu", *PLACES, *overrides_of(method)])


@pytest.mark.parametrize("name", [method.name for method in known_methods()])
def test_the_trainer_runs_the_method_that_the_exact_track_judges(name: str) -> None:
    method, config = find_method(name), loaded(name)
    assert config.algorithm.rollout_correction == method.correction
    actor = config.actor_rollout_ref.actor
    assert policy_loss_name(actor, method.correction) == method.loss
    for key, value in method.options.items():
        assert getattr(actor.policy_loss, key) == value


def test_a_file_and_a_function_reach_the_trainer(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: decoupled_geo_rs\nrollout_is: token\nrollout_is_threshold: 0.5_5\n")
    assert loaded(str(file)).algorithm.rollout_correction == find_method(str(file)).correction
    assert loaded(f"{__name__}:own_loss").actor_rollout_ref.actor.policy_loss.loss_mode.endswith(":own_loss")
    ranged = "loss_mode=gspo,clip_ratio_high=0.4"
    assert loaded(ranged).actor_rollout_ref.actor.clip_ratio_high == 0.4
    with pytest.raises(ValueError, match=r"own_weight is a weight, .*: write it as a loss of one argument"):
        overrides_of(f"{__name__}:own_weight")
    with pytest.raises(ValueError, match="did you mean decoupled_seq_is"):
        overrides_of("decoupled_sec_is")


@pytest.mark.parametrize("name", TRACKS)
def test_every_run_of_a_track_can_start(name: str) -> None:
    study = TRACKS[name].study(["decoupled_seq_is", "loss_mode=dro,dro_beta=0.1"])
    assert len(study.arms) == 1 + 2 * len(TRACKS[name].conditions)
    for arm, given in study.arms.items():
        folder = f"trainer.default_local_dir={folder_of(Path('runs'), arm, 1)}"
        load_run_config([*study.common, *given, *PLACES, folder])
        keys = [override.partition("=")[0] for override in (*study.common, *given)]
        assert len(keys) == len(set(keys)), "what is compared with kept runs has no order"


def test_conditions_are_those_of_the_studies() -> None:
    """So that their runs count: each arm of a track is made as an arm of a study."""
    names = {"k0": "k0 {} lr1", "k0-4x": "k0 {} lr4", "k1-4x": "k1 {} lr4"}
    short, long = (TRACKS[name].study(CORRECTIONS) for name in ("short", "long"))

    def made(study, arm: str) -> set[str]:
        return planned(study, arm, 1).made_by

    for condition in TRACKS["short"].conditions:
        for method in CORRECTIONS:
            same = names.get(condition, f"{condition} {{}} lr1").format(method)
            assert made(short, f"{condition} {method}") == made(STUDIES["staleness"], same)
    for method in CORRECTIONS:
        assert made(long, f"fp8 {method}") == made(STUDIES["quantised"], f"fp8both {method}")
    assert made(short, CONTROL) == made(STUDIES["controls"], "float32 disabled")
    assert made(long, CONTROL) == made(STUDIES["quantised"], "fp32 disabled")
