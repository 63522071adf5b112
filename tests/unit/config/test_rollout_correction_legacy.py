"""Settings of every era: each row of the migration tables, by hand."""

import pytest

from verl_rc.config.rollout_correction import RolloutCorrectionConfig

Fields = dict[str, object]


def changed(config: RolloutCorrectionConfig) -> Fields:
    """The fields in which a configuration differs from the default."""
    default = RolloutCorrectionConfig().model_dump()
    return {key: value for key, value in config.model_dump().items() if value != default[key]}


def imported(mapping: Fields) -> Fields:
    return changed(RolloutCorrectionConfig.from_legacy(mapping)[0])


TOKEN_BAND, BAND = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_4.0"}, "0.5_4.0"


@pytest.mark.parametrize("key", ["tis_imp_ratio_cap", "behav_imp_weight_cap", "imp_ratio_cap"])
@pytest.mark.parametrize("section", ["", "actor_rollout_ref.actor.", "+actor_rollout_ref.actor."])
def test_era_a(section: str, key: str) -> None:
    assert imported({f"{section}{key}": 10.0}) == {"rollout_is": "token", "rollout_is_threshold": 10.0}
    assert imported({f"{section}{key}": -1}) == {}


def of_b(level: str, mode: str, weighted: bool, **more: object) -> Fields:
    bounds = {"rollout_is_threshold": 4.0, "rollout_is_threshold_lower": 0.5}
    return {**bounds, "rollout_is": weighted, "rollout_is_level": level, "rollout_is_mode": mode, **more}


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("era", ["B1", "B2", "B3"])
def test_era_b_truncation(level: str, era: str) -> None:
    no_veto = {"era": era, "rollout_is_veto_threshold": None}
    assert imported(of_b(level, "truncate", True, **no_veto)) == {
        "rollout_is": level,
        "rollout_is_threshold": 4.0,
    }
    assert imported(of_b(level, "truncate", False, **no_veto)) == {}


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("era", "mode"), [("B1", "clip"), ("B2", "mask")])
def test_era_b_bands_make_weights_zero_before_the_third_release(level: str, era: str, mode: str) -> None:
    no_veto = {"era": era, "rollout_is_veto_threshold": None}
    assert imported(of_b(level, mode, True, **no_veto)) == {"rollout_is": level, "rollout_is_threshold": BAND}
    assert imported(of_b(level, mode, False, **no_veto)) == {}


@pytest.mark.parametrize(
    ("level", "rule"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_era_b_masks_reject_in_the_third_release(level: str, rule: str) -> None:
    rejection = {"rollout_rs": rule, "rollout_rs_threshold": BAND}
    assert imported(of_b(level, "mask", True)) == {
        "rollout_is": level,
        "rollout_is_threshold": 4.0,
        **rejection,
    }
    assert imported(of_b(level, "mask", False)) == rejection


def test_era_b_lower_bound_is_the_reciprocal_by_default() -> None:
    given = {
        "rollout_is_threshold": 4.0,
        "rollout_is": True,
        "rollout_is_mode": "clip",
        "rollout_is_veto_threshold": None,
    }
    assert imported(given) == {"rollout_is": "token", "rollout_is_threshold": "0.25_4.0"}


@pytest.mark.parametrize(
    ("era", "weighted", "given", "veto"),
    [
        ("B1", True, {}, 1e-4),
        ("B2", True, {}, 1e-4),
        ("B3", True, {}, None),
        ("B1", False, {}, None),
        ("B2", False, {"rollout_is_veto_threshold": 1e-3}, None),
        ("B3", False, {"rollout_is_veto_threshold": 1e-3}, 1e-3),
        ("B3", True, {"rollout_is_veto_threshold": 1e-3}, 1e-3),
    ],
)
def test_era_b_veto(era: str, weighted: bool, given: Fields, veto: float | None) -> None:
    config, _ = RolloutCorrectionConfig.from_legacy(of_b("token", "truncate", weighted, era=era, **given))
    assert config.rollout_token_veto_threshold == veto


@pytest.mark.parametrize("threshold", [None, 0, -1.0])
def test_era_b_without_a_threshold_computed_nothing(threshold: object) -> None:
    config, notes = RolloutCorrectionConfig.from_legacy(
        {"rollout_is_threshold": threshold, "rollout_is": True}
    )
    assert config == RolloutCorrectionConfig()
    assert any("nothing was computed" in note for note in notes)


@pytest.mark.parametrize(
    ("level", "rule"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
@pytest.mark.parametrize(("lower", "bound"), [(0.5, BAND), (None, 4.0), (0, "1e-09_4.0")])
def test_era_c_rejection(level: str, rule: str, lower: object, bound: object) -> None:
    given = {"rollout_rs": level, "rollout_rs_threshold": 4.0, "rollout_rs_threshold_lower": lower}
    assert imported({"algorithm": {"rollout_correction": given}}) == {
        "rollout_rs": rule,
        "rollout_rs_threshold": bound,
    }


@pytest.mark.parametrize("key", ["use_pure_rollout_correction", "use_policy_gradient"])
@pytest.mark.parametrize(("value", "loss"), [(True, "reinforce"), (False, "ppo_clip")])
def test_era_c_modes(key: str, value: bool, loss: str) -> None:
    config, _ = RolloutCorrectionConfig.from_legacy({"bypass_old_logprob_for_rollout": True, key: value})
    assert (config.bypass_mode, config.loss_type) == (True, loss)


def test_era_c_veto_keeps_its_meaning() -> None:
    given = {"rollout_rs": "geometric", "rollout_rs_threshold": 1.001, "rollout_token_veto_threshold": 1e-4}
    config, notes = RolloutCorrectionConfig.from_legacy(given)
    assert config == RolloutCorrectionConfig.from_preset("geo_rs")
    assert any("one-sided" in note for note in notes)


def test_era_d_is_read_as_it_stands_and_lopsided_bounds_are_pointed_out() -> None:
    given = {
        "rollout_rs": "seq_mean_k1,seq_mean_k3",
        "rollout_rs_threshold": "0.5_1.25,0.1",
        "rollout_is": "token",
    }
    config, notes = RolloutCorrectionConfig.from_legacy(
        {f"algorithm.rollout_correction.{k}": v for k, v in given.items()}
    )
    assert changed(config) == given
    assert any("k1_bound_convention=inverse" in note for note in notes)
    turned, _ = RolloutCorrectionConfig.from_legacy({**given, "k1_bound_convention": "inverse"})
    assert turned.rollout_rs_threshold == "0.8_2.0,0.1"


def test_era_d_symmetric_bounds_need_no_note() -> None:
    _, notes = RolloutCorrectionConfig.from_legacy(
        {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    )
    assert notes == ["read as settings of era D."]


def test_both_copies_of_era_d_are_accepted_when_equal() -> None:
    both = {
        "algorithm.rollout_correction.bypass_mode": True,
        "actor_rollout_ref.actor.policy_loss.rollout_correction.bypass_mode": True,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "bypass_mode",
        "actor_rollout_ref.actor.use_rollout_log_probs": True,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
    }
    config, notes = RolloutCorrectionConfig.from_legacy(both)
    assert changed(config) == {"bypass_mode": True}
    assert sum("is dropped" in note for note in notes) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout_is_self_norm": True}, "did you mean"),
        ({"algorithms.rollout_is": "token"}, "is no rollout-correction key"),
        ({"tis_imp_ratio_cap": 2.0, "rollout_is_level": "token"}, "different releases"),
        ({"rollout_is_level": "token", "use_policy_gradient": True}, "different releases"),
        ({"rollout_is_level": "turn", "rollout_is_threshold": 2.0}, "must be token, sequence or geometric"),
        ({"rollout_is_mode": "zero", "rollout_is_threshold": 2.0}, "truncate, clip or mask"),
        ({"rollout_rs": "token"}, "needs rollout_rs_threshold"),
        ({"tis_imp_ratio_cap": "ten"}, "must be a number"),
        ({"tis_imp_ratio_cap": 2.0, "imp_ratio_cap": 3.0}, "one cap"),
        ({"era": "E"}, "era must be one of"),
        ({"k1_bound_convention": "both"}, "k1_bound_convention must be one of"),
        ({"era": "A", "tis_imp_ratio_cap": 2, "bypass_mode": True}, "does not belong to era A"),
        (
            {
                "algorithm.rollout_correction.bypass_mode": True,
                "actor.policy_loss.rollout_correction.bypass_mode": False,
            },
            "given twice",
        ),
    ],
)
def test_refusals(given: Fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig.from_legacy(given)
