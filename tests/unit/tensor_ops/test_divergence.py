"""KL estimators: golden values and gradients, and the exact KL of a small distribution."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from verl_rc.tensor_ops import (
    KL_KINDS,
    binary_kl,
    bound_log_ratio,
    k1_estimate,
    k2_estimate,
    k3_estimate,
    kl_penalty,
    require_functions,
)

CASES = json.loads((Path(__file__).parents[2] / "golden" / "kl_penalty.json").read_text())["cases"]


def double(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES, ids=[f"{index}-{case['kind']}" for index, case in enumerate(CASES)])
def test_golden_value_and_gradient(case: dict) -> None:
    log_probs = double(case["log_probs"]).requires_grad_()
    value = kl_penalty(log_probs, double(case["ref_log_probs"]), case["kind"])
    torch.testing.assert_close(value.detach(), double(case["expected"]), rtol=1e-6, atol=1e-6)
    value.sum().backward()
    torch.testing.assert_close(log_probs.grad, double(case["grad_of_sum"]), rtol=1e-6, atol=1e-6)


def test_golden_cases_cover_every_kind() -> None:
    same_by_another_name = {"kl+", "mse+", "k2+"}  # k1+, and k2, whose gradient the + forms take
    assert {case["kind"] for case in CASES} | same_by_another_name == set(KL_KINDS)


def distributions() -> tuple[Tensor, Tensor]:
    """Logits of the policy (with gradient) and log-probs of the reference, over five tokens."""
    logits = double([[0.3, -0.8, 1.1, 0.0, -0.4]])[0].requires_grad_()
    return logits, double([[0.9, 0.2, -0.5, 0.4, -1.0]])[0].log_softmax(-1)


def expected_gradient(kind: str) -> Tensor:
    """Gradient of the estimator averaged over tokens sampled from the policy, sampling itself not being
    differentiated."""
    logits, reference = distributions()
    log_probs = logits.log_softmax(-1)
    (log_probs.detach().exp() * kl_penalty(log_probs, reference, kind)).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("kind", ["k2", "mse", "k1+", "kl+", "abs+", "k3+", "low_var_kl+"])
def test_gradient_is_that_of_the_kl(kind: str) -> None:
    logits, reference = distributions()
    log_probs = logits.log_softmax(-1)
    (log_probs.exp() * (log_probs - reference)).sum().backward()
    torch.testing.assert_close(expected_gradient(kind), logits.grad)


def test_k1_has_no_gradient_and_k3_that_of_the_opposite_kl() -> None:
    logits, reference = distributions()
    assert expected_gradient("k1").abs().max() < 1e-12
    (reference.exp() * (reference - logits.log_softmax(-1))).sum().backward()
    torch.testing.assert_close(expected_gradient("k3"), logits.grad)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_value_is_unbiased(kind: str) -> None:
    logits, reference = distributions()
    log_probs = logits.detach().log_softmax(-1)
    kl = sum(p.exp() * (p - q) for p, q in zip(log_probs, reference, strict=True))
    torch.testing.assert_close((log_probs.exp() * kl_penalty(log_probs, reference, kind)).sum(), kl)


@pytest.mark.parametrize(
    ("kind", "says"), [("full", "whole distributions"), ("k4", "k3"), ("k1++", "k1"), ("", "k1")]
)
def test_refuses_what_it_cannot_estimate(kind: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kl_penalty(torch.zeros(1), torch.zeros(1), kind)


def test_estimates_and_binary_divergence_by_hand() -> None:
    """Of a policy with 1/4 on the sampled token over one with 1/2."""
    log_ratio = torch.tensor(0.25, dtype=torch.float64).log() - torch.tensor(0.5, dtype=torch.float64).log()
    assert float(k1_estimate(log_ratio)) == pytest.approx(math.log(2))
    assert float(k2_estimate(log_ratio)) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(k3_estimate(log_ratio)) == pytest.approx(0.5 - 1 + math.log(2))
    quarter, half = torch.tensor([0.25, 0.5], dtype=torch.float64).log()
    assert float(binary_kl(quarter, half)) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert float(binary_kl(half, half)) == 0
    assert float(bound_log_ratio(torch.tensor(-31.0))) == -20


def test_binary_divergence_keeps_its_digits_near_certainty() -> None:
    """p = 1 - 1e-12, q = 1 - 2e-12: about 1e-12 (ln(1/2) + 1), where probabilities would leave four
    digits."""
    first, second = (torch.tensor(-rest, dtype=torch.float64) for rest in (1e-12, 2e-12))
    assert float(binary_kl(first, second)) == pytest.approx(1e-12 * (math.log(0.5) + 1), rel=1e-3)
    certain = torch.tensor(0.0, dtype=torch.float64)
    assert float(binary_kl(certain, second)) == pytest.approx(2e-12, rel=1e-3)
    assert bool(binary_kl(second, certain).isfinite())


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(kind: str, dtype: torch.dtype) -> None:
    """Gaps of one step of bfloat16, about 0.016: k3 in that precision is off by up to a quarter."""
    log_probs = torch.tensor([[-2.0, -2.015625, -3.0]], dtype=dtype)
    reference = torch.tensor([[-2.015625, -2.0, -3.015625]], dtype=dtype)
    value = kl_penalty(log_probs, reference, kind)
    assert value.dtype == torch.float32
    torch.testing.assert_close(
        value.double(), kl_penalty(log_probs.double(), reference.double(), kind), rtol=1e-3, atol=1e-9
    )


@pytest.mark.parametrize("functions", [{"k1": abs}, {"k1": abs, "k2": abs, "k3": abs}])
def test_a_name_without_its_function_is_refused_where_the_table_stands(functions: dict) -> None:
    require_functions("divergence", ["k1", "k2"], {"k1": abs, "k2": abs})
    with pytest.raises(TypeError, match="each name of a divergence must have a function"):
        require_functions("divergence", ["k1", "k2"], functions)
