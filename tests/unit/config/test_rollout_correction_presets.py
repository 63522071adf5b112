"""Presets: every name builds a valid configuration, today's names equal verl's, old names keep their
meaning."""

import json
from pathlib import Path

import pytest

from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig, preset_fields

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "presets.json").read_text())["presets"]


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_name_builds(name: str) -> None:
    assert RolloutCorrectionConfig.from_preset(name) == RolloutCorrectionConfig.model_validate(
        preset_fields(name, {})
    )


@pytest.mark.parametrize("name", list(GOLDEN))
def test_names_of_today_have_verls_fields(name: str) -> None:
    config = RolloutCorrectionConfig.from_preset(name).model_dump()
    assert {key: config[key] for key in GOLDEN[name]} == GOLDEN[name]


def test_constructors_take_their_parameters() -> None:
    assert RolloutCorrectionConfig.decoupled_seq_is(threshold=3.0).weight_threshold().upper == 3.0
    assert RolloutCorrectionConfig.decoupled_token_is() == RolloutCorrectionConfig.from_preset(
        "decoupled_token_is"
    )


def test_names_of_december_2025_keep_their_veto() -> None:
    config = RolloutCorrectionConfig.from_preset("geo_rs")
    assert config.rollout_token_veto_threshold == 1e-4
    assert config.rejection_bounds()["seq_mean_k1"].upper == 1.001


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="decoupled_seq_is"):
        preset_fields("decoupled_seq_iss", {})


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("trm", {"rollout_rs": "seq_max_k2,seq_mean_k3", "rollout_rs_threshold": "0.5,0.01"}),
        ("kpop", {"rollout_rs": "token_kpop", "rollout_rs_threshold": 2.0}),
        ("icepop", {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
        ("prefix_is", {"rollout_is": "prefix", "rollout_is_threshold": 2.0}),
        ("topr", {"rollout_is": None, "bypass_mode": True, "loss_type": "topr"}),
        (
            "seq_mis",
            {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "1e-09_2.0"},
        ),
        ("ppo_is_bypass", {"rollout_is": "token", "bypass_mode": True, "loss_type": "ppo_clip"}),
        ("pure_is", {"rollout_is": "sequence", "bypass_mode": True, "loss_type": "reinforce"}),
    ],
)
def test_other_names(name: str, fields: dict[str, object]) -> None:
    config = RolloutCorrectionConfig.from_preset(name).model_dump()
    assert {key: config[key] for key in fields} == fields


def test_constructors_of_today_give_the_presets_of_their_names() -> None:
    for name in GOLDEN:
        assert getattr(RolloutCorrectionConfig, name)() == RolloutCorrectionConfig.from_preset(name)


def test_a_key_of_a_section_leaves_the_preset_the_others() -> None:
    chosen = RolloutCorrectionConfig.from_preset("score_centering", score_centering={"top_k": 8})
    assert (chosen.score_centering.enabled, chosen.score_centering.top_k) == (True, 8)
