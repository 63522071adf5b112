"""Both ways of sweeping write all of the outputs, whatever was there."""

import pytest
import torch
from appendix_a import random_case

from verl_rc.correction.context import RowContext
from verl_rc.correction.log_ratio import LogProbs
from verl_rc.correction.outputs import TokenOutputs
from verl_rc.correction.resolved import ResolvedCorrection
from verl_rc.correction.sweep import sweep


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_output_is_written(level: str) -> None:
    train, rollout, mask = random_case(9, 7, seed=3)
    batch, resolved = LogProbs(train, rollout, mask), ResolvedCorrection.of({"rollout_is": level})
    outputs = TokenOutputs(torch.full_like(train, torch.nan), torch.zeros_like(mask))
    sweep(batch, resolved, RowContext(), outputs)
    assert outputs.weights is not None
    assert torch.equal(outputs.weights > 0, mask)
    assert outputs.keep.all()
