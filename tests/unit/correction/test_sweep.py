"""What is swept in compiled loops."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.correction.log_ratio import LogProbs
from verl_rc.correction.resolved import ResolvedCorrection
from verl_rc.correction.sweep import SMALLEST_PASS, fits_one_pass


def log_probs(rows: int, width: int, dtype: torch.dtype = torch.float32) -> LogProbs:
    zeros = torch.zeros(rows, width, dtype=dtype)
    return LogProbs(zeros, zeros, torch.ones(rows, width, dtype=torch.bool))


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({}, True),
        ({"rollout_is": "token", "diagnostics": "full"}, True),
        ({"rollout_is": "geometric", "rollout_token_veto_threshold": 1e-4, "nonfinite_logprob": "raise"}, True),
        ({"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.5_2.0,0.1"}, True),
        ({"rollout_is": "prefix"}, False),
        ({"rollout_rs": "token_tv", "rollout_rs_threshold": 0.1}, False),
        ({"rollout_opsm_threshold": 0.1}, False),
        ({"nonfinite_logprob": "neutral"}, False),
        ({"nonfinite_logprob": "reject_token"}, False),
    ],
)
def test_options_that_only_tensor_code_knows(fields: dict[str, object], fits: bool) -> None:
    resolved = ResolvedCorrection.of(fields)
    assert fits_one_pass(log_probs(1024, SMALLEST_PASS // 1024), resolved) is fits


def test_small_batches_other_types_and_other_memory_are_swept_tensor_by_tensor() -> None:
    resolved, width = ResolvedCorrection.of({}), SMALLEST_PASS // 1024
    assert not fits_one_pass(log_probs(1023, width), resolved)
    assert not fits_one_pass(log_probs(1024, width, torch.bfloat16), resolved)
    assert not fits_one_pass(LogProbs(*(x.to("meta") for x in vars(log_probs(1024, width)).values())), resolved)
    with FakeTensorMode():
        assert not fits_one_pass(log_probs(1024, width), resolved)
