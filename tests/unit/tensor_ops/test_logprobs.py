"""Scores of tokens from hidden states: against float64 loops, finite differences, plain torch, and their
memory; log-probs between policies."""

import math
from functools import partial

import pytest
import torch
from live_bytes import LiveBytes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.tensor_ops import HiddenStateScores, ScoreOptions, logprobs, scores_from_hidden_states
from verl_rc.tensor_ops.logprobs import interpolate_proximal

TOKENS = torch.tensor([0, 3, 6, 2, 2])
EVERYTHING = ScoreOptions(entropies=True, sum_pi_squared=True)
CHUNKS = [1, 15, 21, 35]
"""Elements at a time of the 5 x 7 logits: one token of the vocabulary, three, four, all at once."""


def logits(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(5, 7, generator=generator, dtype=torch.float64)).to(dtype)


def scores_of(
    given: Tensor, options: ScoreOptions = EVERYTHING, tokens: Tensor = TOKENS
) -> HiddenStateScores:
    """Scores under ``given`` logits: the hidden states of a head whose weights are the unit matrix."""
    return scores_from_hidden_states(given, torch.eye(given.shape[1], dtype=given.dtype), tokens, options)


def probabilities(row: list[float], temperature: float) -> list[float]:
    exponentials = [math.exp(value / temperature) for value in row]
    return [value / sum(exponentials) for value in exponentials]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("elements", CHUNKS)
def test_values_are_those_of_the_definition(
    temperature: float, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
    rows = [probabilities(row, temperature) for row in logits().tolist()]
    chosen = [math.log(row[token]) for row, token in zip(rows, TOKENS.tolist(), strict=True)]
    found = scores_of(logits(), ScoreOptions(temperature, entropies=True, sum_pi_squared=True))
    assert found.log_probs.tolist() == pytest.approx(chosen, rel=1e-12)
    assert found.entropies is not None
    assert found.entropies.tolist() == pytest.approx(
        [-sum(p * math.log(p) for p in row) for row in rows], rel=1e-12
    )
    assert found.sum_pi_squared is not None
    assert found.sum_pi_squared.tolist() == pytest.approx(
        [sum(p * p for p in row) for row in rows], rel=1e-12
    )
    assert found.varentropies is not None
    means = [sum(p * math.log(p) for p in row) for row in rows]
    squares = [sum(p * (math.log(p) - mean) ** 2 for p in row) for row, mean in zip(rows, means, strict=True)]
    assert found.varentropies.tolist() == pytest.approx(squares, rel=1e-12)


def test_tokens_that_cannot_be_drawn_add_no_varentropy() -> None:
    """Three tokens in equal parts have one log-prob; 1/3 and 2/3 have p (1 - p) (log 2)^2; a certain token
    has no variance."""
    log2, never = math.log(2), -1000.0
    given = torch.tensor([[0.0, 0.0, 0.0, never], [0.0, log2, never, never], [0.0, -200.0, never, never]])
    found = scores_of(given, tokens=torch.zeros(3, dtype=torch.int64)).varentropies
    assert found is not None
    assert found.tolist() == pytest.approx([0.0, 2 / 9 * log2**2, 0.0], abs=1e-6)


def test_of_equally_likely_tokens_the_squares_sum_to_one_over_their_number() -> None:
    result = scores_of(torch.full((5, 8), 3.0, dtype=torch.bfloat16)).sum_pi_squared
    assert result is not None
    assert result.dtype == torch.float32
    assert result.tolist() == [0.125] * 5


def test_what_is_not_asked_for_is_not_there() -> None:
    assert scores_of(logits(), ScoreOptions())[1:] == (None,) * 6


def head(
    dtype: torch.dtype = torch.float64, tokens: int = 5, width: int = 4, vocabulary: int = 7
) -> list[Tensor]:
    """Random hidden states, weights and biases."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(tokens, width), (vocabulary, width), (vocabulary,)]
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in sizes
    ]


@pytest.mark.parametrize("elements", CHUNKS)
def test_gradients_are_those_of_finite_differences(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return scores_from_hidden_states(hidden, weight, TOKENS, ScoreOptions(0.7, entropies=True), bias)[:2]

    assert torch.autograd.gradcheck(both, head())


def plain_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies with all logits at once."""
    table = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return table.gather(-1, tokens[:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("elements", [500, 100_000], ids=["chunks", "at once"])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_gradients_equal_those_of_all_logits_at_once(
    elements: int, entropy_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
    tokens = torch.randint(0, 301, (64,), generator=torch.Generator().manual_seed(2))
    slopes = torch.randn(64, generator=torch.Generator().manual_seed(3))
    gradients = []
    for fused in (True, False):
        given = head(torch.float32, tokens=64, width=32, vocabulary=301)
        if fused:
            options = ScoreOptions(0.8, entropies=True, entropy_gradient=entropy_weight != 0)
            log_probs, entropies, *_ = scores_from_hidden_states(
                given[0], given[1], tokens, options, given[2]
            )
            assert entropies is not None
            assert entropies.requires_grad == (entropy_weight != 0)
        else:
            log_probs, entropies = plain_scores(*given, tokens, 0.8)
        ((log_probs + entropy_weight * entropies) * slopes).sum().backward()
        gradients.append([part.grad for part in given])
    for found, expected in zip(*gradients, strict=True):
        assert found is not None
        assert expected is not None
        assert float((found - expected).norm() / expected.norm()) <= 1e-6


def test_frozen_weights_get_no_gradient_and_hidden_states_theirs() -> None:
    hidden, weight, bias = head()
    scores_from_hidden_states(
        hidden, weight.detach(), TOKENS, EVERYTHING, bias.detach()
    ).log_probs.sum().backward()
    expected = torch.autograd.grad(plain_scores(hidden, weight, bias, TOKENS, 1.0)[0].sum(), hidden)[0]
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, expected)
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    given = logits(dtype).requires_grad_()
    found = scores_of(given)
    assert found.log_probs.dtype == torch.float32
    expected = given.detach().double().log_softmax(-1).gather(-1, TOKENS[:, None])[:, 0]
    torch.testing.assert_close(found.log_probs.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert found.entropies is not None
    (found.log_probs.sum() + found.entropies.sum()).backward()
    assert given.grad is not None
    assert given.grad.dtype == dtype


def test_in_low_precision_chunks_add_no_rounding_to_the_weights_and_little_to_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = torch.randint(0, 301, (64,), generator=torch.Generator().manual_seed(2))

    def gradients(elements: int) -> list[Tensor]:
        monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
        hidden, weight, _ = head(torch.bfloat16, tokens=64, width=32, vocabulary=301)
        scores_from_hidden_states(hidden, weight, tokens, ScoreOptions()).log_probs.sum().backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return [weight.grad, hidden.grad]

    (whole_weight, whole_hidden), (weight, hidden) = gradients(1 << 20), gradients(500)
    assert torch.equal(weight, whole_weight)
    assert float((hidden.double() - whole_hidden.double()).norm() / whole_hidden.double().norm()) < 2**-8


@pytest.mark.parametrize("elements", CHUNKS)
def test_a_narrower_head_is_computed_in_the_precision_of_the_hidden_states(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 weights and bias, float32 hidden states: the numbers of the weights cast as a whole, whose
    gradient is rounded once."""
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 3, generator=generator).requires_grad_()
    head = [torch.randn(7, *more, generator=generator).bfloat16().requires_grad_() for more in ([3], [])]
    wide = [
        hidden.detach().double().requires_grad_(),
        *(part.detach().double().requires_grad_() for part in head),
    ]
    for states, weight, bias in ([hidden, *head], wide):
        scores = scores_from_hidden_states(states, weight, TOKENS, EVERYTHING, bias)
        assert scores.entropies is not None
        (scores.log_probs.sum() + 0.3 * scores.entropies.sum()).backward()
        if states is hidden:
            found = scores
    assert found.log_probs.dtype == torch.float32
    torch.testing.assert_close(found.log_probs.double(), scores.log_probs, rtol=0, atol=1e-5)
    for narrow, exact, rounding in zip([hidden, *head], wide, (1e-5, 2**-8, 2**-8), strict=True):
        assert narrow.grad is not None
        torch.testing.assert_close(narrow.grad.double(), exact.grad, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("elements", CHUNKS)
def test_excluded_tokens_have_probability_zero(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their logits are -inf, here by a bias; in the first case they fill a block."""
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
    hidden, weight, bias = (part.detach() for part in head())
    bias[5] = -math.inf
    for part in (hidden, weight):
        part.requires_grad_()
    rest = [0, 1, 2, 3, 4, 6]
    found = scores_from_hidden_states(hidden, weight, TOKENS, EVERYTHING, bias)
    among = (hidden @ weight[rest].T + bias[rest]).log_softmax(-1)
    assert found.entropies is not None
    torch.testing.assert_close(found.entropies, -(among.exp() * among).sum(-1))
    (found.entropies.sum() + found.log_probs.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert weight.grad[5].eq(0).all()


@pytest.mark.parametrize("elements", CHUNKS)
def test_what_is_not_a_number_stays_visible(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
    broken = logits()
    broken[1, 4] = math.nan
    for values in scores_of(broken)[:4]:
        assert values is not None
        assert values.isnan().tolist() == [False, True, False, False, False]


def test_the_gradient_of_a_likely_token_has_the_digits_that_16_bits_round_away() -> None:
    """``1 - p = 1 / (1 + e^8) = 3.35e-4``, where p in bfloat16 is 1."""
    given = torch.tensor([[8.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    scores_of(given, ScoreOptions(), torch.zeros(1, dtype=torch.int64)).log_probs.sum().backward()
    assert given.grad is not None
    assert given.grad[0].tolist() == pytest.approx([1 / (1 + math.exp(8)), -1 / (1 + math.exp(8))], rel=2**-8)


ON_A_GPU = [(1.0, False, False), (0.7, False, False), (0.7, True, False), (0.7, True, True)]
"""Temperature, entropies, sums of squares: what passes over log-probs and updates of one run ask for."""


@pytest.mark.parametrize(
    ("device", "cases"),
    [
        ("cpu", [ON_A_GPU[-1]]),
        pytest.param("cpu", ON_A_GPU, marks=pytest.mark.slow),
        pytest.param("cuda", ON_A_GPU, marks=pytest.mark.gpu),
    ],
)
def test_what_a_gpu_compiles_is_one_graph_with_the_same_numbers(
    device: str, cases: list[tuple[float, bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it is traced for other sizes of batch and vocabulary, but not made into machine code."""
    counts = (9, 5, 2, 1, 0) if len(cases) > 1 else (5, 1)
    expected = [compiled_case(case, tokens, "cpu") for case in cases for tokens in counts]
    monkeypatch.setattr(logprobs, "_gpu_bytes", lambda _: 40 * 100 * 4)  # blocks of 40 logits in bf16
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    logprobs._compiled.cache_clear()
    found = [compiled_case(case, tokens, device) for case in cases for tokens in counts]
    logprobs._compiled.cache_clear()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def compiled_case(case: tuple[float, bool, bool], tokens: int, device: str) -> list[Tensor]:
    """Scores and gradients of bf16 hidden states, on the CPU."""
    hidden, weight, _ = (
        part.detach().to(device).requires_grad_()
        for part in head(torch.bfloat16, tokens, width=8, vocabulary=21)
    )
    temperature, with_entropies, with_squares = case
    options = ScoreOptions(temperature, with_entropies, with_entropies, with_squares)
    scores = scores_from_hidden_states(hidden, weight, torch.arange(tokens, device=device), options)
    sum(values.sum() for values in scores[:2] if values is not None).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    values = [values.detach() for values in scores if values is not None]
    return [part.cpu() for part in (*values, hidden.grad, weight.grad)]


def test_memory_is_a_twentieth_of_what_all_logits_and_their_gradient_would_take() -> None:
    """16k tokens and a vocabulary of 152k, in bf16, without memory: together 9.3 GiB."""
    tokens, width, vocabulary = 1 << 14, 64, 152_064
    with FakeTensorMode():
        hidden = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
        with LiveBytes() as live:
            found = scores_from_hidden_states(
                hidden, weight, torch.empty(tokens, dtype=torch.int64), EVERYTHING
            )
            assert found.entropies is not None
            (found.log_probs + found.entropies).sum().backward()
    assert live.peak - 2 * vocabulary * width < 2 * tokens * vocabulary * 2 / 20


def test_no_hidden_host_sync() -> None:
    with FakeTensorMode():
        hidden, weight = torch.empty(5, 4, requires_grad=True), torch.empty(7, 4, requires_grad=True)
        found = scores_from_hidden_states(hidden, weight, torch.empty(5, dtype=torch.int64), EVERYTHING)
        assert found.entropies is not None
        (found.log_probs + found.entropies).sum().backward()
        assert found.log_probs.shape == (5,)


def test_no_rows() -> None:
    hidden, weight, bias = head()
    found = scores_from_hidden_states(hidden[:0], weight, TOKENS[:0], EVERYTHING, bias)
    assert found.entropies is not None
    (found.log_probs.sum() + found.entropies.sum()).backward()
    for part in (hidden, weight, bias):  # ranks without tokens take part in the reduction of gradients
        assert part.grad is not None
        assert part.grad.eq(0).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_refuses_temperatures_that_are_not_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        scores_of(logits(), ScoreOptions(temperature))


def test_refuses_shapes_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"\[K, H\]"):
        scores_from_hidden_states(torch.zeros(2, 3), torch.zeros(5, 4), TOKENS[:2], EVERYTHING)
    with pytest.raises(ValueError, match="token_ids"):
        scores_of(logits(), tokens=TOKENS[:3])


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
    assert interpolate_proximal(rollout, current, versions, 4, 9).tolist() == [
        [-1.0, -2.0]
    ]  # never older: bypass mode
    assert interpolate_proximal(rollout, current, versions, 9, 9).tolist() == [[-3.0, -5.0]]
    assert interpolate_proximal(rollout, current, versions, 4, 4).tolist() == [[-1.0, -2.0]]
    assert not interpolate_proximal(rollout, current, versions, 5, 9).requires_grad


def test_infinite_log_probs_of_unused_policies_do_not_spread() -> None:
    current = torch.tensor([[float("-inf")]])
    assert interpolate_proximal(torch.tensor([[-1.0]]), current, torch.tensor([[3]]), 3, 5).tolist() == [
        [-1.0]
    ]


def test_what_cannot_be_is_named() -> None:
    nothing = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"\[1, 2\], \[1, 2\] and \[1, 3\]"):
        interpolate_proximal(nothing, nothing, torch.zeros(1, 3), 0, 1)
    with pytest.raises(ValueError, match="proximal_version must not be above current_version=1; got 2"):
        interpolate_proximal(nothing, nothing, nothing.long(), 2, 1)
