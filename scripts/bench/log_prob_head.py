"""The output layer fused with log-probs against all logits at once: seconds at small sizes, memory at a large
vocabulary.

Usage: python scripts/bench/log_prob_head.py Both ways in turns, forward and backward, as ratios; then the
peak of memory for 16k tokens, a width of 3584 and a vocabulary of 152k in bf16, by fake tensors, which take
none.
"""

import argparse

import torch
import torch.nn.functional as F
from interleaved import interleaved_seconds
from live_bytes import LiveBytes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.tensor_ops import ScoreOptions, scores_from_hidden_states

SIZES = [(256, 192, 258), (1400, 192, 258), (8192, 256, 258), (2048, 256, 4096), (1024, 256, 32_000)]
"""Tokens, width, vocabulary; the first two are a micro-batch and a mini-batch of the quickstart."""
LARGE = (1 << 14, 3584, 152_064)


def inputs(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden states and weights, with gradient, and token ids."""
    hidden, weight = (
        torch.randn(tokens, width, dtype=dtype),
        0.3 * torch.randn(vocabulary, width, dtype=dtype),
    )
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(vocabulary, (tokens,))


def fused(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> None:
    """Gradients of the sum of log-probs, a chunk of logits at a time."""
    scores_from_hidden_states(hidden, weight, token_ids, ScoreOptions()).log_probs.sum().backward()


def at_once(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> None:
    """The same with all logits."""
    F.linear(hidden, weight).log_softmax(-1).gather(-1, token_ids[:, None]).sum().backward()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("| tokens | width | vocabulary | all logits, ms | fused / all logits |\n|---|---|---|---|---|")
    for size in SIZES:
        arguments = inputs(*size, torch.float32)
        plain, new = interleaved_seconds([lambda: at_once(*arguments), lambda: fused(*arguments)], rounds)  # noqa: B023
        print(f"| {' | '.join(map(str, size))} | {1000 * plain:.2f} | {new / plain:.2f} |", flush=True)
    tokens, _, vocabulary = LARGE
    with FakeTensorMode():
        arguments = inputs(*LARGE, torch.bfloat16)
        with LiveBytes() as live:
            fused(*arguments)
    beyond = live.peak - arguments[0].nbytes - arguments[1].nbytes
    logits = 2 * tokens * vocabulary * 2
    print(
        f"Peak beyond the gradients of weights and hidden states: {beyond / 2**30:.2f} GiB. All logits and "
        "their gradient:"
    )
    print(f"{logits / 2**30:.2f} GiB, {logits / beyond:.1f} times as much.")


if __name__ == "__main__":
    main()
