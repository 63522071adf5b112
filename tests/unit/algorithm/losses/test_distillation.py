"""The teacher's term of the loss against float64 loops, and what must not change it."""

import math

import pytest
import torch
from torch import Tensor

from verl_rc.algorithm.losses import (
    Aggregation,
    PolicyLossInputs,
    TopTokens,
    clean_policy_loss_inputs,
    compute_distillation_loss,
)

ROWS, WIDTH = 4, 5
LENGTHS = (5, 3, 0, 1)
BOUND = 0.7


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


RESPONSE = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
KEPT = RESPONSE & (numbers(4) > -0.8)
CURRENT, OLD, TEACHER = numbers(1) - 3, numbers(1) - 3 + numbers(2, 0.4), numbers(3) - 3
WEIGHTS = numbers(5).exp()


def inputs_of(current: Tensor, rows: slice | list[int]) -> PolicyLossInputs:
    inputs = PolicyLossInputs(
        ratio_denominator=OLD[rows],
        log_probs=current[rows],
        advantages=torch.full_like(current[rows], torch.nan),
        loss_mask=KEPT[rows],
        response_mask=RESPONSE[rows],
        denominator_mask=RESPONSE[rows],
        rollout_is_weights=WEIGHTS[rows],
        aggregation=Aggregation("token-mean", num_tokens=int(RESPONSE.sum())),
    )
    return clean_policy_loss_inputs(inputs)


def term(
    current: Tensor,
    kind: str,
    policy_loss: str | None,
    rows: slice | list[int] = slice(None),
    teacher: Tensor = TEACHER,
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """The loss of some rows of the mini-batch, and the sums and counts of its metrics."""
    loss, metrics = compute_distillation_loss(
        inputs_of(current, rows), teacher[rows], kind, BOUND, policy_loss
    )
    return loss, {name: (float(mean.total), float(mean.count)) for name, mean in metrics.items()}


def estimate(kind: str, log_ratio: float) -> float:
    """Of KL(current || teacher) by log current / teacher."""
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(-log_ratio) - 1 + log_ratio}[kind]


def expected(kind: str, policy_loss: str | None) -> tuple[float, Tensor]:
    """The loss and its gradient, by loops in double precision."""
    total, gradient = 0.0, torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row, column in KEPT.nonzero().tolist():
        place = (row, column)
        current, old, teacher, weight = (float(values[place]) for values in (CURRENT, OLD, TEACHER, WEIGHTS))
        log_ratio = current - teacher
        divergence = min(max(estimate(kind, log_ratio), -BOUND), BOUND)
        if policy_loss is None:
            slope = {"k2": log_ratio, "k3": 1 - math.exp(-log_ratio)}[kind]
            value, slope = divergence, slope * (abs(estimate(kind, log_ratio)) < BOUND)
        elif policy_loss == "reinforce":
            value, slope = divergence * current, divergence
        else:
            ratio, advantage = math.exp(current - old), -divergence
            clipped = min(max(ratio, 0.8), 1.2)
            value = max(-advantage * ratio, -advantage * clipped)
            slope = -advantage * ratio if value == -advantage * ratio else 0.0
            if advantage < 0 and value > -3 * advantage:
                value, slope = -3 * advantage, 0.0
        total += weight * value
        gradient[place] = weight * slope
    count = int(RESPONSE.sum())
    return total / count, gradient / count


CASES = [(kind, None) for kind in ("k2", "k3")] + [
    (kind, loss) for kind in ("k1", "k2", "k3") for loss in ("vanilla", "reinforce")
]


@pytest.mark.parametrize(("kind", "policy_loss"), CASES)
def test_loss_and_gradient_equal_a_float64_loop(kind: str, policy_loss: str | None) -> None:
    current = CURRENT.clone().requires_grad_()
    loss, _ = term(current, kind, policy_loss)
    loss.backward()
    value, gradient = expected(kind, policy_loss)
    assert current.grad is not None
    assert float(loss.detach()) == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(current.grad.double(), gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("kind", "policy_loss"), CASES)
def test_parts_in_any_order_add_up_and_what_is_not_kept_is_harmless(
    kind: str, policy_loss: str | None
) -> None:
    whole, metrics = term(CURRENT, kind, policy_loss)
    spoilt = TEACHER.masked_fill(~KEPT, torch.nan)
    parts = [term(CURRENT, kind, policy_loss, rows, spoilt) for rows in ([3, 1], [0], [2])]
    assert float(whole) == pytest.approx(sum(float(loss) for loss, _ in parts), rel=1e-6)
    for name, (total, count) in metrics.items():
        assert total == pytest.approx(sum(found[name][0] for _, found in parts), rel=1e-6, abs=1e-9)
        assert count == sum(found[name][1] for _, found in parts) == int(KEPT.sum())


@pytest.mark.parametrize(("kind", "policy_loss"), CASES)
def test_a_policy_that_is_its_teacher_stays(kind: str, policy_loss: str | None) -> None:
    current = CURRENT.clone().requires_grad_()
    loss, metrics = term(current, kind, policy_loss, teacher=CURRENT)
    loss.backward()
    assert current.grad is not None
    assert not current.grad.any()
    assert metrics["distillation/reverse_kl"][0] == 0


def test_over_the_policys_own_tokens_the_advantages_are_the_gradient_of_the_reverse_divergence() -> None:
    """Summed over all tokens with their probability as weight, as an expectation over samples is."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
    teacher = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (true,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    everything = torch.ones(1, 6, dtype=torch.bool)
    inputs = PolicyLossInputs(
        ratio_denominator=policy.detach()[None],
        log_probs=policy[None],
        advantages=torch.zeros(1, 6),
        loss_mask=everything,
        response_mask=everything,
        denominator_mask=everything,
        rollout_is_weights=policy.detach().exp()[None],
        aggregation=Aggregation("token-sum"),
    )
    loss, _ = compute_distillation_loss(inputs, teacher[None], "k1", policy_loss="vanilla")
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, true, rtol=1e-6, atol=1e-9)


# ---- The words that the teacher finds most likely.


def of_words(seed: int) -> Tensor:
    """Log-probs of three words in each token's place; the rest of the probability is a fourth's."""
    noise = torch.randn(ROWS, WIDTH, 4, generator=torch.Generator().manual_seed(seed))
    return noise.log_softmax(dim=-1)[..., :3]


TEACHERS_WORDS, CURRENT_WORDS = of_words(11), of_words(12)
TEACHERS_WORDS[0, 0, 2] = CURRENT_WORDS[0, 1, 0] = CURRENT_WORDS[1, 0, 1] = -math.inf
FLOORS = [None, -1.5]


def term_of_words(
    current: Tensor,
    lowest: float | None,
    rows: slice | list[int] = slice(None),
    teacher: Tensor = TEACHERS_WORDS,
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    words = TopTokens(teacher[rows], current[rows], lowest)
    loss, metrics = compute_distillation_loss(
        inputs_of(CURRENT, rows), TEACHER[rows], "forward_kl_topk", BOUND, top_tokens=words
    )
    return loss, {name: (float(mean.total), float(mean.count)) for name, mean in metrics.items()}


def expected_of_words(lowest: float | None) -> tuple[float, Tensor]:
    """The loss and its gradient, by loops in double precision."""
    total, gradient = 0.0, torch.zeros(ROWS, WIDTH, 3, dtype=torch.float64)
    for row, column in KEPT.nonzero().tolist():
        divergence, slopes = 0.0, [0.0] * 3
        for word in range(3):
            teacher, current = (float(one[row, column, word]) for one in (TEACHERS_WORDS, CURRENT_WORDS))
            is_raised = lowest is not None and current < lowest
            teacher, current = (
                value if lowest is None else max(value, lowest) for value in (teacher, current)
            )
            if math.isinf(teacher) or math.isinf(current):
                continue
            divergence += math.exp(teacher) * (teacher - current)
            slopes[word] = 0.0 if is_raised else -math.exp(teacher)
        weight, is_inside = float(WEIGHTS[row, column]), 0 < divergence < BOUND
        total += weight * min(max(divergence, 0.0), BOUND)
        gradient[row, column] = weight * is_inside * torch.tensor(slopes, dtype=torch.float64)
    count = int(RESPONSE.sum())
    return total / count, gradient / count


@pytest.mark.parametrize("lowest", FLOORS)
def test_the_divergence_over_the_teachers_words_equals_a_float64_loop(lowest: float | None) -> None:
    current = CURRENT_WORDS.clone().requires_grad_()
    loss, metrics = term_of_words(current, lowest)
    loss.backward()
    value, gradient = expected_of_words(lowest)
    assert current.grad is not None
    assert float(loss.detach()) == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(current.grad.double(), gradient, rtol=1e-4, atol=1e-7)
    for owner, words in (("student", CURRENT_WORDS), ("teacher", TEACHERS_WORDS)):
        mass = float(words.double().exp().sum(-1)[KEPT].sum())
        assert metrics[f"distillation/{owner}_mass"] == (pytest.approx(mass, rel=1e-6), int(KEPT.sum()))


@pytest.mark.parametrize("lowest", FLOORS)
def test_parts_over_the_teachers_words_add_up_and_what_is_not_kept_is_harmless(lowest: float | None) -> None:
    whole, metrics = term_of_words(CURRENT_WORDS, lowest)
    outside = ~KEPT[..., None]
    current = CURRENT_WORDS.masked_fill(outside, torch.nan).requires_grad_()
    spoilt = TEACHERS_WORDS.masked_fill(outside, torch.nan)
    parts = [term_of_words(current, lowest, rows, spoilt) for rows in ([3, 1], [0], [2])]
    total = sum((loss for loss, _ in parts), torch.zeros(()))
    assert float(whole) == pytest.approx(float(total.detach()), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, current)
    assert gradient.isfinite().all()
    for name, (value, count) in metrics.items():
        assert value == pytest.approx(sum(found[name][0] for _, found in parts), rel=1e-6, abs=1e-9)
        assert count == sum(found[name][1] for _, found in parts)


def test_a_kept_token_that_is_not_a_number_stays_visible() -> None:
    current = CURRENT_WORDS.clone()
    current[tuple(KEPT.nonzero()[0])] = torch.nan
    assert term_of_words(current, None)[0].isnan()


def test_over_all_words_it_is_the_forward_divergence_and_over_few_it_is_not_below_zero() -> None:
    """Of two words, of which the policy likes the first more than the teacher does, the first is -0.09."""
    teacher, policy = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.8, 0.2]).log()
    everywhere = torch.ones(1, 1, dtype=torch.bool)
    whole = TopTokens(teacher[None, None], policy[None, None]).divergence(everywhere)
    assert float(whole) == pytest.approx(0.7 * math.log(7 / 8) + 0.3 * math.log(1.5), rel=1e-5)
    assert float(TopTokens(teacher[None, None, :1], policy[None, None, :1]).divergence(everywhere)) == 0.0
