"""Proximal log-probs between rollout and current policy, by the age of the weights."""

import pytest
import torch

from verl_rc.tensor_ops.logprobs import interpolate_proximal


def test_every_token_by_its_version_in_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout, current = (-torch.rand(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    versions = torch.randint(0, 11, (5, 7), generator=generator)
    found = interpolate_proximal(rollout, current, versions, proximal_version=6, current_version=10)
    for row in range(5):
        for t in range(7):
            version = int(versions[row, t])
            share = 0.0 if version == 10 else min(max((6 - version) / (10 - version), 0.0), 1.0)
            expected = (1 - share) * float(rollout[row, t]) + share * float(current[row, t])
            assert float(found[row, t]) == pytest.approx(expected, rel=1e-12)


def test_ends_of_the_range() -> None:
    rollout, current = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -5.0]], requires_grad=True)
    versions = torch.tensor([[4, 4]])
    assert interpolate_proximal(rollout, current, versions, 4, 9).tolist() == [[-1.0, -2.0]]  # never older: bypass mode
    assert interpolate_proximal(rollout, current, versions, 9, 9).tolist() == [[-3.0, -5.0]]
    assert interpolate_proximal(rollout, current, versions, 4, 4).tolist() == [[-1.0, -2.0]]
    assert not interpolate_proximal(rollout, current, versions, 5, 9).requires_grad


def test_infinite_log_probs_of_unused_policies_do_not_spread() -> None:
    current = torch.tensor([[float("-inf")]])
    assert interpolate_proximal(torch.tensor([[-1.0]]), current, torch.tensor([[3]]), 3, 5).tolist() == [[-1.0]]


def test_what_cannot_be_is_named() -> None:
    nothing = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"\[1, 2\], \[1, 2\] and \[1, 3\]"):
        interpolate_proximal(nothing, nothing, torch.zeros(1, 3), 0, 1)
    with pytest.raises(ValueError, match="proximal_version must not be above current_version=1; got 2"):
        interpolate_proximal(nothing, nothing, nothing.long(), 2, 1)
