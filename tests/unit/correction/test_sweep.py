"""What the sweep reads and leaves alone."""

import torch
from appendix_a import random_case

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction

CONFIG = RolloutCorrectionConfig(
    rollout_is="token", rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.6_1.6,0.1", diagnostics="full"
)


def test_memory_in_another_order_and_a_mask_of_numbers() -> None:
    train, rollout, mask = random_case(6, 9, seed=1)
    turned = [x.T.contiguous().T for x in (train, rollout, 3.0 * mask)]
    assert not turned[0].is_contiguous()
    found, expected = (compute_rollout_correction(*case, CONFIG) for case in (turned, (train, rollout, mask)))
    assert found.weights is not None
    assert expected.weights is not None
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.keep_mask, expected.keep_mask)
    assert found.metrics() == expected.metrics()


def test_inputs_are_left_as_they_are() -> None:
    case = random_case(6, 9, seed=2)
    copies = [x.clone() for x in case]
    compute_rollout_correction(*case, CONFIG)
    assert all(torch.equal(x, copy) for x, copy in zip(case, copies, strict=True))
