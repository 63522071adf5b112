"""A GPU's side of exact mode on a CPU, by vLLM's kernels in Triton's interpreter: prints what it finds."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton_interpreter  # noqa: F401  (before vLLM)
from attention_loop import attended
from small_models import make_tokens, write_small_model
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import linear as engine_linear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from verl_rc.exact import gpu_engine, gpu_kernels
from verl_rc.exact.operations import require_batch_invariance
from verl_rc.workers.forward import ForwardOptions, score_tokens
from verl_rc.workers.language_model import load_causal_lm
from verl_rc.workers.operations import operations

LENGTHS = [1, 45, 7]
SCALING = 0.25
BLOCK = 16
"""Tokens of a block of the engine's cache: half those of the trainer's."""


def heads(kv_heads: int) -> list[Tensor]:
    return [torch.randn(sum(LENGTHS), count, 32) for count in (4, kv_heads, kv_heads)]


def decoded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The last sequence but one decoded: one query at a time, over a cache of other blocks."""
    first, length = sum(LENGTHS[:-2]), LENGTHS[-2]
    cache = torch.full((4, BLOCK, key.shape[1], 2 * 32), torch.nan)
    table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    rows = []
    for place in range(length):
        slot = table[0, place // BLOCK], place % BLOCK
        cache[slot] = torch.cat([key[first + place], value[first + place]], -1)
        output = torch.empty(1, *query.shape[1:])
        keys, values = cache.split(32, -1)
        unified_attention(
            q=query[first + place, None],
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            max_seqlen_q=1,
            seqused_k=torch.tensor([place + 1], dtype=torch.int32),
            max_seqlen_k=place + 1,
            softmax_scale=SCALING,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=torch.ones(1, key.shape[1]),
            v_descale=torch.ones(1, key.shape[1]),
        )
        rows.append(output)
    return torch.cat(rows)


def attention() -> dict[str, Any]:
    """Against float64, alone against in company, and prefill against decoding."""
    found: dict[str, Any] = {"error": 0.0, "alone": True, "decoded": True}
    lengths = torch.tensor(LENGTHS)
    for kv_heads in (1, 2, 4):
        three = heads(kv_heads)
        whole = gpu_kernels.attend(*three, lengths, SCALING)
        parts = [
            gpu_kernels.attend(*one, torch.tensor([len(one[0])]), SCALING)
            for one in zip(*(tensor.split(LENGTHS) for tensor in three), strict=True)
        ]
        found["error"] = max(found["error"], float((whole - attended(*three, LENGTHS, SCALING)).abs().max()))
        found["alone"] &= torch.equal(torch.cat(parts), whole)
        found["decoded"] &= torch.equal(decoded(*three), whole.split(LENGTHS)[-2])
    return found


def layers() -> dict[str, Any]:
    """Linear layer, norm and rotary frequencies of trainer and engine."""
    x, residual, weight, scale = (torch.randn(*shape) for shape in ((20, 48), (20, 48), (64, 48), (48,)))
    require_batch_invariance({(48, 64)}, torch.float32, gpu_kernels.linear, "cpu")
    gradients = []
    for multiply in (gpu_kernels.linear, F.linear):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        gradients.append(torch.autograd.grad((multiply(*inputs) * torch.arange(64.0)).sum(), inputs))
    layer = nn.Linear(48, 64, bias=False)
    with patch.object(engine_linear, "current_platform", SimpleNamespace(is_cuda_alike=lambda: True)):
        of_engine = engine_linear.UnquantizedLinearMethod().apply(layer, x, None)
    gpu_engine.use_trainer_operations()
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(48)
        norm.weight.data = scale
        normalised, total = norm.forward_cuda(x, residual)
    with torch.device("meta"):
        frequencies = RotaryEmbedding._compute_inv_freq(SimpleNamespace(rotary_dim=8), 10.0)
    return {
        "engine": torch.equal(of_engine, gpu_kernels.linear(x, layer.weight)),
        "gradients": all(map(torch.equal, *gradients)),
        "norm": torch.equal(normalised, gpu_kernels.normalise(x + residual, scale, 1e-6)),
        "sum": torch.equal(total, x + residual),
        "frequencies": frequencies.device.type,
    }


def model(folder: str) -> dict[str, Any]:
    """A policy's log-probs, alone, in company, and of its ordinary operations."""
    write_small_model(Path(folder), head_dim=32)
    tokens, log_probs, gradients = make_tokens([3, 6, 1], [7, 2, 5]), [], []
    score = partial(score_tokens, options=ForwardOptions(0.7), with_entropy=True)
    for exact in (True, False):
        policy = load_causal_lm(folder, torch.float32, operations=operations(exact, torch.float32))
        scores = score(policy, tokens)
        log_probs.append(scores.log_probs)
        weights = torch.linspace(-1.0, 1.0, scores.log_probs.numel())
        (scores.log_probs.flatten() * weights).sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
        if exact:
            rows = [score(policy, tokens[row : row + 1]).log_probs[0] for row in range(3)]
    apart = zip(*gradients, strict=True)
    return {
        "alone": torch.equal(torch.stack(rows), log_probs[0]),
        "same": torch.equal(*log_probs),
        "error": float((log_probs[0] - log_probs[1]).detach().abs().max()),
        "gradient error": max(float((one - other).abs().max()) for one, other in apart),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({"attention": attention(), "layers": layers(), "model": model(sys.argv[1])}))
