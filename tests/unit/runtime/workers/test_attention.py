"""Attention within packed sequences, by one kernel or on a grid; models that need another one are refused."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers import Qwen2Config
from transformers.models.bamba import BambaConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gemma4 import Gemma4TextConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.llama import LlamaConfig
from transformers.models.llama4 import Llama4TextConfig
from transformers.models.mistral import MistralConfig
from transformers.models.olmo3 import Olmo3Config
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.recurrent_gemma import RecurrentGemmaConfig

from verl_rc.runtime.workers import attention
from verl_rc.runtime.workers.attention import Weighting, packed_sdpa
from verl_rc.runtime.workers.packed_layout import Branches, PackedLayout
from verl_rc.runtime.workers.sinks import PackedKernel
from verl_rc.runtime.workers.supported_models import attention_problem

SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("config", "longest", "problem"),
    [
        (Qwen2Config(), 32_768, None),
        (Qwen2Config(sliding_window=4096), 32_768, None),  # switched off
        (Qwen2Config(**SLIDING), 4097, None),
        (Qwen2Config(**{**SLIDING, "max_window_layers": 3}), 64, "Qwen with windows in some layers"),
        (Qwen3Config(), 32_768, None),
        (LlamaConfig(), 32_768, None),
        (MistralConfig(sliding_window=4096), 8192, None),
        (MistralConfig(sliding_window=None), 8192, None),
        (Phi3Config(sliding_window=2047), 4096, "sliding_window=2047 .* lower .* to 2047"),
        (Phi3Config(sliding_window=2047), 2047, None),
        (Gemma2Config(), 1024, "attn_logit_softcapping=50"),
        (Gemma2Config(attn_logit_softcapping=None), 1024, "final_logit_softcapping=30"),
        (Gemma3TextConfig(sliding_window=512), 1024, None),
        (Olmo3Config(), 8192, None),
        (GptOssConfig(), 256, None),
        (Qwen3NextConfig(), 64, None),
        (Gemma4TextConfig(num_kv_shared_layers=2), 64, "keys of other layers .num_kv_shared_layers=2."),
        (Gemma4TextConfig(num_kv_shared_layers=0), 64, "embeddings of their own .*_per_layer_input=256."),
        (Llama4TextConfig(), 64, "layers of kind chunked_attention"),
        (BambaConfig(), 64, "layers of kind linear_attention"),
        (RecurrentGemmaConfig(), 64, "recurrent layers of recurrent_gemma"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "model_type") else str(value),
)
def test_attention_that_is_not_built_is_refused_by_name(
    config: Any, longest: int, problem: str | None
) -> None:
    """E4."""
    found = attention_problem(config, longest)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(problem, found), found


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, False),
        ({"sliding_window": 2}, False),
        ({"softcap": 50.0}, True),
        ({"s_aux": torch.zeros(1)}, False),
        ({"s_aux": torch.zeros(1), "dropout": 0.1}, True),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_a_call_that_wants_more_is_refused(given: dict[str, Any], refused: bool, packed: bool) -> None:
    """Of a model whose configuration did not say so."""
    lengths = torch.tensor([3, 1])
    layout = PackedLayout.from_lengths(lengths) if packed else None
    query = torch.randn(1, 1, int(lengths.sum()) if packed else 3, 4)
    arguments = (torch.nn.Identity(), query, query, query, None)
    if refused:
        with pytest.raises(ValueError, match="which is not built"):
            packed_sdpa(*arguments, packed_layout=layout, **given)
    else:
        packed_sdpa(*arguments, packed_layout=layout, **given)


LENGTHS = [3, 1, 7, 4]
HEADS, KEY_HEADS, HEAD_DIM, SCALING = 4, 2, 8, 0.3


BRANCHES = [([0, 1], 2), ([4, 5, 6, 7], 4), ([0, 1, 15], 1)]
"""Packed tokens that a branch begins with, and how many of its own follow: tokens 15 and 16, 17 to 20,
and 21. The last begins with a token of the first."""


def layout_of(with_branches: bool) -> tuple[PackedLayout, list[list[int]]]:
    """Whole sequences, and branches behind them; with the tokens that each token attends to."""
    layout, seen = PackedLayout.from_lengths(torch.tensor(LENGTHS)), list[list[int]]()
    for length in LENGTHS:
        first = len(seen)
        seen += [list(range(first, first + place + 1)) for place in range(length)]
    if not with_branches:
        return layout, seen
    keys, positions = list[int](), [layout.position_ids]
    for shared, own in BRANCHES:
        first = len(seen)
        seen += [[*shared, *range(first, first + place + 1)] for place in range(own)]
        keys += seen[-1]
        positions.append(torch.arange(len(shared), len(shared) + own))
    own_lengths, lengths = zip(*((own, len(shared) + own) for shared, own in BRANCHES), strict=True)
    branches = Branches.from_lengths(own_lengths, lengths, torch.tensor(keys), torch.device("cpu"))
    return replace(layout, position_ids=torch.cat(positions), branches=branches), seen


def packed_parts(dtype: torch.dtype, tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, heads, tokens, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in sizes
    ]


def attention_by_loop(
    query: Tensor, key: Tensor, value: Tensor, seen: list[list[int]], sinks: Tensor | None = None
) -> Tensor:
    """``[N, heads, head_dim]``: every token looks at those that it sees, and at its head's sink."""
    rows = []
    for token, keys in enumerate(seen):
        of_heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KEY_HEADS)
            logits = SCALING * key[0, shared, keys] @ query[0, head, token]
            if sinks is not None:
                logits = torch.cat([logits, sinks[head : head + 1]])
            of_heads.append(logits.softmax(dim=0)[: len(keys)] @ value[0, shared, keys])
        rows.append(torch.stack(of_heads))
    return torch.stack(rows)


def kernel_by_loop(window: int | None, *given: Any, **options: Any) -> Tensor:
    """What torch says that its kernel computes, in plain steps; arguments are those of its real signature."""
    call = inspect.signature(varlen_attn).bind(*given, **options)
    call.apply_defaults()
    one, rows = call.arguments, []
    left = -1 if window is None else window - 1
    assert (one["cu_seq_q"].dtype, one["window_size"], one["enable_gqa"]) == (torch.int32, (left, 0), True)
    queries, keys = (one[f"cu_seq_{name}"].tolist() for name in "qk")
    for name, ends in (("q", queries), ("k", keys)):
        assert one[f"max_{name}"] == max(end - begin for begin, end in pairwise(ends))
    for of_queries, of_keys in zip(pairwise(queries), pairwise(keys), strict=True):
        query, key, value = (
            one[name][slice(*place)].transpose(0, 1)
            for name, place in (("query", of_queries), ("key", of_keys), ("value", of_keys))
        )
        key, value = (part.repeat_interleave(HEADS // KEY_HEADS, dim=0) for part in (key, value))
        # The last query lies at the last key.
        behind = torch.arange(key.shape[1] - query.shape[1], key.shape[1])[:, None] - torch.arange(
            key.shape[1]
        )
        hidden = (behind < 0) | (behind > left) if left >= 0 else behind < 0
        scores = (one["scale"] * query @ key.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        rows.append((scores.softmax(dim=-1) @ value).transpose(0, 1))
    return torch.cat(rows)


class SinksByLoop(PackedKernel):
    """What PyTorch's kernel and its backward compute, in plain steps."""

    def weights(self, query: Tensor, key: Tensor, value: Tensor, lse: Tensor | None) -> Iterator[list[Any]]:
        """The places, probabilities and keys of each sequence; by ``lse`` or by their own sum."""
        for of_queries, of_keys in zip(*(pairwise(ends.tolist()) for ends in self.ends), strict=True):
            rows, columns = slice(*of_queries), slice(*of_keys)
            keys, values = (part[columns].repeat_interleave(HEADS // KEY_HEADS, 1) for part in (key, value))
            scores = SCALING * torch.einsum("qhd,khd->qhk", query[rows], keys)
            behind = torch.arange(len(keys) - len(scores), len(keys))[:, None] - torch.arange(len(keys))
            left = self.window[0]
            hidden = (behind < 0) | (behind > left) if left >= 0 else behind < 0
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
            sums = scores.logsumexp(-1) if lse is None else lse[rows]
            yield [rows, columns, keys, values, (scores - sums[..., None]).exp(), sums]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        found = list(self.weights(query, key, value, None))
        outputs = [torch.einsum("qhk,khd->qhd", one[4], one[3]) for one in found]
        return torch.cat(outputs), torch.cat([one[5] for one in found])

    def gradients(
        self, gradient: Tensor, parts: tuple[Tensor, Tensor, Tensor], output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = [torch.zeros_like(part) for part in parts]
        for rows, columns, keys, _, shares, _ in self.weights(*parts, lse):
            values = parts[2][columns].repeat_interleave(HEADS // KEY_HEADS, 1)
            of_shares = torch.einsum("qhd,khd->qhk", gradient[rows], values)
            row_sums = (gradient[rows] * output[rows]).sum(-1, keepdim=True)
            of_scores = SCALING * shares * (of_shares - row_sums)
            of_parts = (
                (rows, torch.einsum("qhk,khd->qhd", of_scores, keys)),
                (columns, torch.einsum("qhk,qhd->khd", of_scores, parts[0][rows])),
                (columns, torch.einsum("qhk,qhd->khd", shares, gradient[rows])),
            )
            for whole, (places, part) in zip(found, of_parts, strict=True):
                heads = whole.shape[1]
                whole[places] += part.unflatten(1, (heads, HEADS // heads)).sum(2)
        return found[0], found[1], found[2]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("with_branches", [False, True])
@pytest.mark.parametrize("in_one_kernel", [False, True])
def test_attention_stays_within_each_sequence(
    in_one_kernel: bool,
    with_branches: bool,
    window: int | None,
    with_sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By both ways, with gradients; the kernel itself runs on GPUs alone."""
    monkeypatch.setattr(attention, "runs_flash_kernels", lambda _: in_one_kernel)
    monkeypatch.setattr(attention, "varlen_attn", partial(kernel_by_loop, window))
    monkeypatch.setattr(attention, "PackedKernel", SinksByLoop)
    (layout, seen), found = layout_of(with_branches), []
    if window is not None:
        seen = [keys[-window:] for keys in seen]
    for way in ("packed", "loop"):
        parts = packed_parts(torch.float64, len(seen))
        sinks = torch.linspace(-1.0, 2.0, HEADS, dtype=torch.float64).requires_grad_() if with_sinks else None
        if way == "packed":
            given = {"packed_layout": layout, "sliding_window": window, "s_aux": sinks}
            output = packed_sdpa(torch.nn.Identity(), *parts, None, SCALING, **given)[0][0]
        else:
            output = attention_by_loop(*parts, seen, sinks)
        output.square().sum().backward()
        found.append([output.detach(), *(part.grad for part in (*parts, sinks) if part is not None)])
    for packed, expected in zip(*found, strict=True):
        torch.testing.assert_close(packed, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_branches", [False, True])
def test_the_kernel_takes_what_it_is_given(
    with_branches: bool, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: torch's own shapes and gradients of the kernel, without its numbers."""
    monkeypatch.setattr(attention, "runs_flash_kernels", lambda _: True)
    layout, seen = layout_of(with_branches)
    assert layout.longest == max(LENGTHS) + with_branches
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = [
            torch.empty(part.shape, dtype=torch.bfloat16, requires_grad=True)
            for part in packed_parts(torch.bfloat16, len(seen))
        ]
        given = {"sliding_window": 2, "s_aux": torch.empty(HEADS, requires_grad=True) if with_sinks else None}
        output, _ = packed_sdpa(torch.nn.Identity(), *parts, None, packed_layout=layout, **given)
        assert (output.shape, output.dtype) == ((1, len(seen), HEADS, HEAD_DIM), torch.bfloat16)
        output.sum().backward()
        assert [part.grad is not None and part.grad.shape == part.shape for part in parts] == [True] * 3


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(8, torch.float32), (12, torch.bfloat16), (8, torch.bfloat16)]
)
def test_without_a_gpu_the_grid_is_used(head_dim: int, dtype: torch.dtype) -> None:
    assert not attention.runs_flash_kernels(torch.empty(1, 1, 1, head_dim, dtype=dtype))


def test_a_window_counts_the_query() -> None:
    """Of four tokens with a window of two."""
    sees = Weighting(None, 0.0, window=2).sees(torch.arange(4), 4)
    assert sees.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_padded_rows_have_windows_too() -> None:
    query = torch.randn(2, HEADS, 5, HEAD_DIM, dtype=torch.float64)
    key, value = torch.randn(2, 2, KEY_HEADS, 5, HEAD_DIM, dtype=torch.float64)
    found = packed_sdpa(torch.nn.Identity(), query, key, value, None, SCALING, sliding_window=2)[0]
    for row in range(2):
        seen = [[0], [0, 1], [1, 2], [2, 3], [3, 4]]
        expected = attention_by_loop(query[row : row + 1], key[row : row + 1], value[row : row + 1], seen)
        torch.testing.assert_close(found[row], expected)
