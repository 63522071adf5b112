"""Losses for samples of another policy, against loops in float64: values, gradients, rejected tokens."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from verl_rc.algorithm.losses import compute_policy_loss

LOW, HIGH, CAP = 0.1, 0.3, 1.2
CONFIG = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": CAP, "kl_tau": 0.25, "ipo_eps": 0.2}
Token = tuple[float, float, float, float]
"""Current and old log-prob, advantage, and the log of the sequence's ratio."""


def ipo(token: Token) -> tuple[float, float]:
    current, old, advantage, _ = token
    change, ratio = math.exp(current) - math.exp(old), math.exp(current - old)
    trusted = abs(change) <= 0.2
    value = -advantage * ratio * trusted + 0.25 * (current - old) ** 2
    return value, -advantage * ratio * trusted + 0.5 * (current - old)


def aspo(token: Token) -> tuple[float, float]:
    current, old, advantage, _ = token
    ratio = math.exp(current - old)
    if advantage > 0:
        weight = min(1 / ratio, CAP) if ratio <= 1 + HIGH else 0.0
    else:
        weight = min(ratio, CAP) if ratio >= 1 - LOW else 0.0
    return -advantage * weight * current, -advantage * weight


def up(token: Token) -> tuple[float, float]:
    current, old, advantage, _ = token
    if advantage > 0:
        return -advantage, -advantage
    ratio = math.exp(current - old)
    if ratio < 1 - LOW:
        return -advantage * (1 - LOW), 0.0
    return -advantage * min(ratio, CAP), -advantage * ratio * (ratio <= CAP)


def topr(token: Token) -> tuple[float, float]:
    current, _, advantage, of_sequence = token
    weight = 1.0 if advantage >= 0 else min(math.exp(of_sequence), 1.0)
    return -advantage * weight * current, -advantage * weight


def vespo(token: Token) -> tuple[float, float]:
    current, _, advantage, of_sequence = token
    power, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    weight = math.exp(of_sequence) ** power * math.exp(decay * (1 - math.exp(of_sequence)))
    return -advantage * weight * current, -advantage * weight


LOOPS: dict[str, Callable[[Token], tuple[float, float]]] = {
    "ipo": ipo,
    "aspo": aspo,
    "topr": topr,
    "up": up,
    "vespo": vespo,
}
"""The loss of a token, and its slope in the current log-prob."""


def tokens_of(batch: Any) -> Iterator[tuple[tuple[int, int], Token]]:
    """The tokens in the loss. A sequence's ratio is that of all of its response, rejected tokens too."""
    for row, column in batch.loss_mask.nonzero().tolist():
        gaps = (batch.log_probs[row] - batch.old_log_probs[row])[batch.response_mask[row]].tolist()
        numbers = (batch.log_probs, batch.old_log_probs, batch.advantages)
        yield (row, column), (*(float(number[row, column]) for number in numbers), sum(gaps))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOOPS)
def test_loss_and_gradient_are_those_of_a_loop(name: str, seed: int, make_batch: Callable[..., Any]) -> None:
    batch = make_batch(seed=seed, rows=12)
    log_probs = batch.log_probs.clone().requires_grad_()
    arguments = {**batch.policy_loss_arguments(), "log_probs": log_probs}
    loss, _ = compute_policy_loss(name, **arguments, config=CONFIG)
    loss.backward()
    count, total = int(batch.response_mask.sum()), 0.0
    slopes = torch.zeros_like(batch.log_probs)
    for place, token in tokens_of(batch):
        value, slope = LOOPS[name](token)
        total += float(batch.weights[place]) * value / count
        slopes[place] = float(batch.weights[place]) * slope / count
    assert loss.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(log_probs.grad, slopes)


def moved(current: float, old: float, advantage: float) -> float:
    """How far the token's probability has moved to where its advantage pushes it."""
    return (math.exp(current) - math.exp(old)) * math.copysign(1, advantage)


@pytest.mark.parametrize(
    ("name", "share", "lower"),
    [
        (
            "ipo",
            lambda c, o, a, s: abs(math.exp(c) - math.exp(o)) > 0.2,
            None,
        ),
        ("aspo", lambda c, o, a, s: math.exp(c - o) > 1 + HIGH if a > 0 else math.exp(c - o) < 1 - LOW, None),
        (
            "up",
            lambda c, o, a, s: a < 0 and math.exp(c - o) < 1 - LOW,
            lambda c, o, a, s: a < 0 and math.exp(c - o) > CAP,
        ),
        ("topr", lambda c, o, a, s: False, lambda c, o, a, s: a < 0 and s > 0),
    ],
)
def test_shares_of_clipped_tokens_are_counted(name, share, lower, make_batch: Callable[..., Any]) -> None:
    batch = make_batch(seed=7, rows=12)
    _, metrics = compute_policy_loss(name, **batch.policy_loss_arguments(), config=CONFIG)
    tokens = [token for _, token in tokens_of(batch)]
    counted = sum(share(*token) for token in tokens) / len(tokens)
    assert metrics["actor/pg_clipfrac"].value.item() == pytest.approx(counted)
    assert counted > 0 or name == "topr"
    if lower is not None:
        counted = sum(lower(*token) for token in tokens) / len(tokens)
        assert metrics["actor/pg_clipfrac_lower"].value.item() == pytest.approx(counted)
        assert counted > 0


def test_luspo_is_the_clipped_ratio_of_a_sequence_times_its_length(make_batch: Callable[..., Any]) -> None:
    """The formula as TRL has it: one term a sequence, which carries the gradient of all its tokens."""
    batch = make_batch(seed=2, rows=10)
    log_probs = batch.log_probs.clone().requires_grad_()
    mask = batch.response_mask
    loss, _ = compute_policy_loss(
        "luspo",
        batch.old_log_probs,
        log_probs,
        batch.advantages,
        mask,
        config=CONFIG,
        aggregation="token-mean",
    )
    loss.backward()
    again = batch.log_probs.clone().requires_grad_()
    lengths = mask.sum(dim=-1)
    means = ((again - batch.old_log_probs) * mask).sum(dim=-1) / lengths.clamp(min=1)
    advantages, ratios = batch.advantages[:, 0], means.exp()
    terms = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(1 - LOW, 1 + HIGH))
    wanted = (terms * lengths).sum() / int((lengths > 0).sum())
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item())
    torch.testing.assert_close(log_probs.grad, again.grad)


def test_vespo_leaves_what_has_not_moved_and_damps_both_sides() -> None:
    def weight(ratio: float, advantage: float) -> float:
        current = torch.tensor([[math.log(ratio) - 1]], dtype=torch.float64, requires_grad=True)
        loss, _ = compute_policy_loss(
            "vespo", torch.full((1, 1), -1.0), current, torch.full((1, 1), advantage), torch.ones(1, 1)
        )
        loss.backward()
        return -float(current.grad) / advantage

    for sign in (1.0, -1.0):
        assert weight(1.0, sign) == pytest.approx(1)
        assert weight(8.0, sign) < 1e-3
        assert weight(0.05, sign) < 0.05
    assert weight(1.5, -1.0) > weight(1.5, 1.0)  # its kernel is largest at k / λ
    # Beyond the largest ratio nothing overflows, and no token gets a NaN.
    assert weight(1e30, 1.0) == 0.0
