"""What every policy loss is given: cleaned tensors, and options read from a configuration."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl_rc.algorithm.losses import (
    PolicyLossInputs,
    clean_policy_loss_inputs,
    loss_options,
    read_loss_options,
)
from verl_rc.config.distillation import DistillationLossConfig
from verl_rc.config.models import ActorConfig, PolicyLossConfig


def test_values_that_must_not_count_are_cut_and_rejected_finite_ones_are_kept(
    make_batch: Callable[..., Any],
) -> None:
    batch = make_batch(seed=13)
    rejected = batch.response_mask & ~batch.loss_mask
    spoiled = batch.log_probs.masked_fill(~batch.response_mask, torch.nan)
    row, column = rejected.nonzero()[0].tolist()
    spoiled[row, column] = torch.nan
    inputs = clean_policy_loss_inputs(
        PolicyLossInputs(
            ratio_denominator=batch.old_log_probs.clone().requires_grad_(),
            log_probs=spoiled,
            advantages=batch.advantages.requires_grad_(),
            loss_mask=batch.loss_mask.float(),
            response_mask=batch.response_mask.long(),
            denominator_mask=batch.response_mask,
            rollout_is_weights=batch.weights,
        )
    )
    usable = batch.response_mask.clone()
    usable[row, column] = False
    assert torch.equal(inputs.log_probs, batch.log_probs * usable)
    assert torch.equal(inputs.ratio_denominator, batch.old_log_probs * usable)
    assert inputs.log_ratio[row, column] == 0
    assert torch.equal(inputs.rollout_is_weights, batch.weights * batch.loss_mask)
    assert inputs.loss_mask.dtype == inputs.response_mask.dtype == torch.bool
    assert not inputs.ratio_denominator.requires_grad
    assert not inputs.advantages.requires_grad


def test_log_ratio_is_clamped_at_twenty_nats() -> None:
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    inputs = PolicyLossInputs(zeros, torch.tensor([[50.0, -50.0]]), zeros, ones, ones, ones)
    assert inputs.log_ratio.tolist() == [[20.0, -20.0]]


def test_clip_ratio_speaks_for_the_bounds_that_are_not_given() -> None:
    both = read_loss_options({"clip_ratio": 0.1, "clip_ratio_low": None})
    assert both.clip_bounds == (0.1, 0.1)
    higher = loss_options(DistillationLossConfig(clip_ratio=0.1, clip_ratio_high=0.28))
    assert higher.clip_bounds == (0.1, 0.28)


def test_keys_of_policy_loss_are_found_in_the_subsection_and_beside_the_others() -> None:
    policy_loss = PolicyLossConfig(dro_beta=0.3, kl_cov_ratio=0.5)
    parameters = loss_options(ActorConfig(use_dynamic_bsz=True, clip_ratio_c=4, policy_loss=policy_loss))
    assert (parameters.clip_ratio_c, parameters.dro_beta, parameters.kl_cov_ratio) == (4.0, 0.3, 0.5)
    assert read_loss_options({"dro_beta": 0.7}).dro_beta == 0.7
    nested = {"ppo_kl_coef": 0.9, "m2_threshold": None}
    parameters = read_loss_options({"ppo_kl_coef": 0.5, "m2_threshold": 0.1, "policy_loss": nested})
    assert (parameters.ppo_kl_coef, parameters.m2_threshold) == (0.9, 0.1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("clip_ratio_c", 1.0, r"actor\.clip_ratio_c must be greater than 1, got 1\.0"),
        ("clip_ratio_low", -0.1, r"actor\.clip_ratio_low must be greater than or equal to 0, got -0\.1"),
        ("tau_neg", 0.0, r"actor\.tau_neg must be greater than 0"),
        ("clip_cov_ratio", 0.0, r"actor\.clip_cov_ratio must be greater than 0"),
        ("kl_cov_ratio", 1.5, r"actor\.kl_cov_ratio must be less than or equal to 1"),
        ("clip_cov_lb", 6.0, r"policy_loss\.clip_cov_lb must be below clip_cov_ub, got 6\.0 and 5\.0"),
        ("dro_beta", 0.0, r"actor\.dro_beta must be greater than 0"),
        ("tau_pos", "high", r"actor\.tau_pos must be a valid number, .* got 'high'"),
    ],
)
def test_refuses_numbers_out_of_range_by_the_name_of_their_key(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_loss_options({name: value})
