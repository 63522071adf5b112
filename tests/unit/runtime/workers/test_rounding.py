"""The estimate of rounding is what bfloat16 does to a model."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, FULL, LENGTHS, RECURRENT, model_of, tokens

from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.language_model import load_causal_lm
from verl_rc.runtime.workers.rounding import rounding_of_log_probs, unit_of

BF16 = unit_of(torch.float32, torch.bfloat16)
OPTIONS = ForwardOptions(temperature=0.7)


def log_probs(model: torch.nn.Module) -> torch.Tensor:
    return score_tokens(model, tokens(), OPTIONS, with_entropy=False).log_probs.detach()


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT, *FULL])
def test_the_estimate_is_near_what_bfloat16_moves(family: str, tmp_path: Path) -> None:
    model_of(family).save_pretrained(tmp_path)
    model, half = (load_causal_lm(str(tmp_path), dtype) for dtype in (torch.float32, torch.bfloat16))
    with torch.no_grad():
        before = log_probs(model)
        estimate = rounding_of_log_probs(model, tokens(), OPTIONS, BF16)
        moved = (log_probs(half) - before).abs()
        assert torch.equal(log_probs(model), before)  # no error is left behind
    assert torch.equal(estimate != 0, torch.arange(37) < torch.tensor([row for _, row in LENGTHS])[:, None])
    assert 0.5 < float(moved.sum() / estimate.sum()) < 2


def test_a_result_of_eight_digits_is_wrong_by_at_most_half_of_the_last() -> None:
    values = torch.rand(10_000, dtype=torch.float64) + 1
    for dtype in (torch.bfloat16, torch.float16):
        errors = (values.to(dtype).double() / values - 1).abs()
        assert 0.9 * unit_of(dtype) < float(errors.max()) <= unit_of(dtype)


@pytest.mark.parametrize("family", ["mistral", "qwen3_moe", "qwen3_5_text"])
def test_a_trainer_in_bfloat16_estimates_the_same(family: str, tmp_path: Path) -> None:
    model_of(family).save_pretrained(tmp_path)
    model, half = (load_causal_lm(str(tmp_path), dtype) for dtype in (torch.float32, torch.bfloat16))
    with torch.no_grad():
        moved = (log_probs(half) - log_probs(model)).abs().sum()
        estimate = rounding_of_log_probs(half, tokens(), OPTIONS, BF16).sum()
    assert 0.4 < float(moved / estimate) < 2


def test_the_estimate_grows_with_the_unit_and_is_the_same_twice(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), torch.float32)
    with torch.no_grad():
        units = (0.0, BF16 / 8, BF16, BF16)
        none, eighth, one, again = (rounding_of_log_probs(model, tokens(), OPTIONS, unit) for unit in units)
    assert none.sum() == 0
    assert float(one.sum() / eighth.sum()) == pytest.approx(8, rel=0.1)
    assert torch.equal(one, again)
