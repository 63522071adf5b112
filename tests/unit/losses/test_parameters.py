"""Reading the numbers of the losses from a configuration."""

from types import SimpleNamespace

import pytest

from verl_rc.config.actor import ActorConfig, PolicyLossConfig
from verl_rc.losses import PolicyLossParameters


def test_clip_ratio_speaks_for_the_bounds_that_are_not_given() -> None:
    both = PolicyLossParameters.from_config({"clip_ratio": 0.1, "clip_ratio_low": None})
    assert (both.clip_ratio_low, both.clip_ratio_high) == (0.1, 0.1)
    higher = PolicyLossParameters.from_config(SimpleNamespace(clip_ratio=0.1, clip_ratio_high=0.28))
    assert (higher.clip_ratio_low, higher.clip_ratio_high) == (0.1, 0.28)


def test_keys_of_policy_loss_are_found_in_the_subsection_and_beside_the_others() -> None:
    nested = SimpleNamespace(clip_ratio_c=4, policy_loss=SimpleNamespace(dro_beta=0.3, kl_cov_ratio=0.5))
    parameters = PolicyLossParameters.from_config(nested)
    assert (parameters.clip_ratio_c, parameters.dro_beta, parameters.kl_cov_ratio) == (4.0, 0.3, 0.5)
    assert PolicyLossParameters.from_config({"dro_beta": 0.7}).dro_beta == 0.7
    both = {"ppo_kl_coef": 0.5, "policy_loss": {"ppo_kl_coef": 0.9}}
    assert PolicyLossParameters.from_config(both).ppo_kl_coef == 0.9


def test_nothing_given_and_records_pass_through() -> None:
    assert PolicyLossParameters.from_config(None) == PolicyLossParameters.from_config({}) == PolicyLossParameters()
    record = PolicyLossParameters(tau_pos=2.0)
    assert PolicyLossParameters.from_config(record) is record


def test_defaults_are_those_of_the_configuration() -> None:
    schema = {**ActorConfig.model_fields, **PolicyLossConfig.model_fields}
    shared = {name for name in schema if hasattr(PolicyLossParameters(), name)}
    assert {"clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg"} <= shared
    assert PolicyLossParameters.from_config(ActorConfig(ppo_micro_batch_size_per_gpu=1)) == PolicyLossParameters()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("clip_ratio_c", 1.0, r"actor\.clip_ratio_c must be > 1, got 1\.0"),
        ("clip_ratio_low", -0.1, r"actor\.clip_ratio_low must be >= 0"),
        ("tau_neg", 0.0, r"actor\.tau_neg must be > 0"),
        ("clip_cov_ratio", 0.0, r"policy_loss\.clip_cov_ratio must be in \(0, 1\]"),
        ("clip_cov_lb", 6.0, r"policy_loss\.clip_cov_lb must be < clip_cov_ub"),
        ("dro_beta", 0.0, r"policy_loss\.dro_beta must be > 0"),
        ("tau_pos", "high", r"actor\.tau_pos must be a number, got 'high'"),
    ],
)
def test_refuses_numbers_out_of_range_by_the_name_of_their_key(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLossParameters.from_config({name: value})
