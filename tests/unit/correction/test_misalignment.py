"""What ``misalignment_z`` can see, and what not: policies over eight tokens whose distributions are known."""

import pytest
import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction

ROWS, WIDTH, VOCABULARY = 400, 16, 8


def z_of(rollout: Tensor, reported: Tensor, train: Tensor, shift: int = 0) -> float:
    """z of tokens sampled from ``rollout``, with log-probs ``reported`` by the engine and ``train``; all
    ``[ROWS, WIDTH, V]``."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.multinomial(rollout.exp().flatten(0, 1), 1, generator=generator).view(ROWS, WIDTH, 1)
    of_engine, of_trainer = (log_probs.gather(-1, tokens)[..., 0].float() for log_probs in (reported, train))
    mask, config = torch.ones(ROWS, WIDTH), RolloutCorrectionConfig(diagnostics="full")
    correction = compute_rollout_correction(of_trainer, of_engine.roll(shift, dims=1), mask, config)
    return correction.metrics()["rollout_corr/misalignment_z"]


def policies(change: float = 0.0) -> tuple[Tensor, Tensor]:
    """Logits of the trainer, and the same with noise of that size: an older policy."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, WIDTH, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits, logits + change * torch.randn(logits.shape, generator=generator, dtype=torch.float64)


def without_tail(log_probs: Tensor, kept_mass: float) -> Tensor:
    """Top-p: the most likely tokens that hold ``kept_mass`` together, normalised."""
    ordered, order = log_probs.sort(dim=-1, descending=True)
    outside = ordered.exp().cumsum(-1) - ordered.exp() >= kept_mass
    return log_probs.masked_fill(outside.gather(-1, order.argsort(-1)), -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.2])
def test_another_temperature_is_not_seen(temperature: float) -> None:
    logits, _ = policies()
    engine = (logits / temperature).log_softmax(-1)
    assert abs(z_of(engine, engine, logits.log_softmax(-1))) < 6


def test_stale_weights_and_another_prompt_are_not_seen() -> None:
    logits, older = policies(change=0.5)
    engine = older.log_softmax(-1)
    assert abs(z_of(engine, engine, logits.log_softmax(-1))) < 6
    other_prompt = logits.roll(1, dims=0).log_softmax(-1)
    assert abs(z_of(other_prompt, other_prompt, logits.log_softmax(-1))) < 6


def test_a_filter_that_is_not_mirrored_is_seen() -> None:
    logits, _ = policies()
    train = logits.log_softmax(-1)
    engine = without_tail(train, 0.9)
    assert z_of(engine, engine, train) < -6


def test_shifted_log_probs_are_seen() -> None:
    logits, _ = policies()
    train = logits.log_softmax(-1)
    assert abs(z_of(train, train, train)) < 6
    assert abs(z_of(train, train, train, shift=1)) > 6
