"""``algorithm``: verl's defaults, and every field documented."""

from verl_rc.config.algorithm import AlgorithmConfig


def test_defaults_are_verls() -> None:
    section = AlgorithmConfig.model_validate({})
    expected = {"adv_estimator": "gae", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False, "norm_adv_by_std_in_grpo": True}
    assert {name: getattr(section, name) for name in expected} == expected


def test_every_field_says_what_it_means() -> None:
    assert all(field.description for field in AlgorithmConfig.model_fields.values())
