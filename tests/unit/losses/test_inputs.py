"""Cleaning of the inputs of policy losses."""

from collections.abc import Callable
from typing import Any

import torch

from verl_rc.losses import PolicyLossInputs, clean_policy_loss_inputs


def test_values_that_must_not_count_are_cut_and_rejected_finite_ones_are_kept(make_batch: Callable[..., Any]) -> None:
    batch = make_batch(seed=13)
    rejected = batch.response_mask & ~batch.loss_mask
    spoiled = batch.log_probs.masked_fill(~batch.response_mask, torch.nan)
    row, column = rejected.nonzero()[0].tolist()
    spoiled[row, column] = torch.nan
    inputs = clean_policy_loss_inputs(
        PolicyLossInputs(
            old_log_probs=batch.old_log_probs.clone().requires_grad_(),
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
    assert torch.equal(inputs.old_log_probs, batch.old_log_probs * usable)
    assert inputs.log_ratio[row, column] == 0
    assert torch.equal(inputs.rollout_is_weights, batch.weights * batch.loss_mask)
    assert inputs.loss_mask.dtype == inputs.response_mask.dtype == torch.bool
    assert not inputs.old_log_probs.requires_grad
    assert not inputs.advantages.requires_grad


def test_log_ratio_is_clamped_at_twenty_nats() -> None:
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    inputs = PolicyLossInputs(zeros, torch.tensor([[50.0, -50.0]]), zeros, ones, ones, ones)
    assert inputs.log_ratio.tolist() == [[20.0, -20.0]]
