"""Log-probs and entropies from logits: against float64 loops, finite differences, and their memory; those between policies."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.tensor_ops import entropy_from_logits, log_probs_from_logits, logprobs, sum_pi_squared_from_logits
from verl_rc.tensor_ops.logprobs import interpolate_proximal

TOKENS = torch.tensor([0, 3, 6, 2, 2])


def logits(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(5, 7, generator=generator, dtype=torch.float64)).to(dtype)


def probabilities(row: list[float], temperature: float) -> list[float]:
    exponentials = [math.exp(value / temperature) for value in row]
    return [value / sum(exponentials) for value in exponentials]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_values_are_those_of_the_definition(temperature: float) -> None:
    rows = [probabilities(row, temperature) for row in logits().tolist()]
    chosen = [math.log(row[token]) for row, token in zip(rows, TOKENS.tolist(), strict=True)]
    entropies = [-sum(p * math.log(p) for p in row) for row in rows]
    assert log_probs_from_logits(logits(), TOKENS, temperature).tolist() == pytest.approx(chosen, rel=1e-12)
    assert entropy_from_logits(logits(), temperature).tolist() == pytest.approx(entropies, rel=1e-12)
    squares = [sum(p * p for p in row) for row in rows]
    assert sum_pi_squared_from_logits(logits(), temperature).tolist() == pytest.approx(squares, rel=1e-12)


def test_cutting_into_chunks_changes_no_sum_of_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sum_pi_squared_from_logits(logits())
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", {"cpu": 7})
    assert torch.equal(sum_pi_squared_from_logits(logits().requires_grad_()), whole)


def test_of_equally_likely_tokens_the_squares_sum_to_one_over_their_number() -> None:
    result = sum_pi_squared_from_logits(torch.full((2, 8), 3.0, dtype=torch.bfloat16))
    assert result.dtype == torch.float32
    assert result.tolist() == [0.125, 0.125]


def test_gradients_are_those_of_finite_differences() -> None:
    at = logits().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: log_probs_from_logits(x, TOKENS, 0.7), at)
    assert torch.autograd.gradcheck(lambda x: entropy_from_logits(x, 0.7), at)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    given = logits(dtype).requires_grad_()
    result = log_probs_from_logits(given, TOKENS)
    assert result.dtype == torch.float32
    expected = given.detach().double().log_softmax(-1).gather(-1, TOKENS[:, None])[:, 0]
    torch.testing.assert_close(result.detach().double(), expected, rtol=1e-5, atol=1e-6)
    (result.sum() + entropy_from_logits(given).sum()).backward()
    assert given.grad is not None
    assert given.grad.dtype == dtype


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> tuple[Tensor, Tensor, Tensor]:
        at = logits().requires_grad_()
        log_probs, entropies = log_probs_from_logits(at, TOKENS), entropy_from_logits(at)
        (log_probs.sum() + 2 * entropies.sum()).backward()
        assert at.grad is not None
        return log_probs, entropies, at.grad

    whole = both()
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", {"cpu": 15})  # two rows at a time
    for chunked, expected in zip(both(), whole, strict=True):
        torch.testing.assert_close(chunked, expected, rtol=1e-14, atol=1e-14)


def test_excluded_tokens_have_probability_zero() -> None:
    given = logits()
    given[:, 5] = -math.inf
    given.requires_grad_()
    rest = [0, 1, 2, 3, 4, 6]
    entropies = entropy_from_logits(given)
    torch.testing.assert_close(entropies, entropy_from_logits(given[:, rest]))
    (entropies.sum() + log_probs_from_logits(given, TOKENS).sum()).backward()
    assert given.grad is not None
    assert given.grad.isfinite().all()
    assert given.grad[:, 5].eq(0).all()


def test_backward_keeps_one_gradient_and_a_chunk() -> None:
    given = torch.randn(64, 1 << 15, dtype=torch.bfloat16, requires_grad=True)  # 4 MiB
    tokens = torch.zeros(64, dtype=torch.int64)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        log_probs_from_logits(given, tokens)
        entropy_from_logits(given)
    new = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    new.pop(given.untyped_storage().data_ptr())
    assert sum(new.values()) <= 64 * (8 + 4 + 4)  # token ids, normalisers, entropies


def test_no_hidden_host_sync() -> None:
    with FakeTensorMode():
        at = torch.empty(5, 7, requires_grad=True)
        result = log_probs_from_logits(at, torch.empty(5, dtype=torch.int64), 0.5) + entropy_from_logits(at)
        result.sum().backward()
        assert result.shape == (5,)


def test_no_rows() -> None:
    empty = torch.empty(0, 7, requires_grad=True)
    (log_probs_from_logits(empty, TOKENS[:0]).sum() + entropy_from_logits(empty).sum()).backward()
    assert empty.grad is not None
    assert empty.grad.shape == (0, 7)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_refuses_temperatures_that_are_not_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        log_probs_from_logits(logits(), TOKENS, temperature)
    with pytest.raises(ValueError, match="temperature"):
        entropy_from_logits(logits(), temperature)


def test_refuses_shapes_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"\[N, V\]"):
        entropy_from_logits(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="token_ids"):
        log_probs_from_logits(logits(), TOKENS[:3])


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
