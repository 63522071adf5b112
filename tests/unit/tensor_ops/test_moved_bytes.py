"""The bytes that log-probs from hidden states move on a GPU, counted on tensors without memory."""

import pytest
import torch
from live_bytes import LiveBytes
from moved_bytes import MovedBytes
from torch import Tensor

from verl_rc.tensor_ops import ScoreOptions, logprobs, scores_from_hidden_states

TOKENS = 1 << 14
LARGE = (3584, 152_064)
"""Width and vocabulary of Qwen2.5-7B."""
SMALL = (896, 151_936)
"""Of Qwen2.5-0.5B."""
EVERYTHING = ScoreOptions(entropies=True, sum_pi_squared=True)
GIGABYTE = 10**9


def moved(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], options: ScoreOptions, update: bool) -> int:
    """Bytes of the scores of bf16 hidden states, and with ``update`` of the gradients, on a GPU of 80 GiB."""
    monkeypatch.setattr(logprobs, "_gpu_bytes", lambda device: 80 << 30)
    hidden, weight = (
        torch.empty(rows, size[0], dtype=torch.bfloat16, device="meta", requires_grad=update)
        for rows in (TOKENS, size[1])
    )
    token_ids = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    with MovedBytes() as counter:
        monkeypatch.setattr(logprobs, "_compiled", counter.kernel)
        scores = scores_from_hidden_states(hidden, weight, token_ids, options)
        if update:
            targets = [values for values in scores if values is not None and values.requires_grad]
            torch.autograd.backward(targets, [torch.ones_like(values) for values in targets])
    return counter.bytes


def test_log_probs_with_full_diagnostics_at_7b(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 GB were asked for. The logits, written once and read twice, are 15 of them."""
    assert moved(monkeypatch, LARGE, EVERYTHING, update=False) <= 20 * GIGABYTE


@pytest.mark.parametrize("entropies", [False, True])
def test_an_update_at_7b(entropies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """110 GB were asked for, of forward and backward pass."""
    assert moved(monkeypatch, LARGE, ScoreOptions(entropies=entropies), update=True) <= 60 * GIGABYTE


def test_a_small_model_moves_its_head_and_its_logits_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward pass the logits are written and read, their gradient is written and read twice, and the
    head is read twice and its gradient written."""
    head, logits = (2 * rows * SMALL[1] for rows in (SMALL[0], TOKENS))
    scores = moved(monkeypatch, SMALL, EVERYTHING, update=False)
    update = moved(monkeypatch, SMALL, EVERYTHING, update=True)
    assert scores <= 3 * (head + logits)
    assert update - scores <= 6 * (head + logits)


@pytest.mark.parametrize("fault", ["blocks of 2^24 logits", "nothing is compiled"])
def test_the_budget_sees(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "nothing is compiled":
        monkeypatch.setattr(logprobs, "_fused", lambda function, device: function)
    else:
        monkeypatch.setattr(logprobs, "logits_at_once", lambda gpu_bytes, itemsize: 1 << 24)
    assert moved(monkeypatch, LARGE, EVERYTHING, update=False) > 30 * GIGABYTE
    assert moved(monkeypatch, LARGE, EVERYTHING, update=True) > 110 * GIGABYTE


def test_two_blocks_of_a_hundredth_of_the_memory_are_alive_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits and their gradient, beside hidden states and the gradients that are returned."""
    monkeypatch.setattr(logprobs, "_gpu_bytes", lambda device: 80 << 30)
    monkeypatch.setattr(logprobs, "_differentiate", lambda logits, *_: torch.empty_like(logits))
    monkeypatch.setattr(logprobs, "_sum_block", one_sum)
    monkeypatch.setattr(logprobs, "_fused", lambda function, device: function)
    hidden, weight = (
        torch.empty(rows, LARGE[0], dtype=torch.bfloat16, device="meta", requires_grad=True)
        for rows in (TOKENS, LARGE[1])
    )
    token_ids = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    with LiveBytes() as live:
        scores_from_hidden_states(hidden, weight, token_ids, ScoreOptions()).log_probs.sum().backward()
    assert live.peak - weight.nbytes - 4 * hidden.nbytes <= (80 << 30) / 100


def one_sum(logits: Tensor, *_: object) -> logprobs._VocabularySums:
    """The results of the kernel, without what it keeps in registers."""
    numbers = torch.empty(logits.shape[0], device="meta")
    return logprobs._VocabularySums(numbers, numbers, None, None, None)


def softmax(values: Tensor) -> Tensor:
    below = values - values.amax(-1, keepdim=True)
    return below.exp() / below.exp().sum(-1, keepdim=True)


def test_an_operation_reads_its_tensors_and_writes_its_result() -> None:
    values = torch.empty(10, 100, device="meta")
    with MovedBytes() as counter:
        values.view(100, 10).add_(torch.empty(10, device="meta"))
    assert counter.bytes == 4000 + 40 + 4000


def test_a_kernel_reads_its_input_once_in_each_loop_over_a_row() -> None:
    """Maximum, sum, result."""
    values = torch.empty(10, 100, device="meta")
    with MovedBytes() as counter:
        counter.kernel(softmax)(values)
    assert counter.bytes == 3 * 4000 + 4000
