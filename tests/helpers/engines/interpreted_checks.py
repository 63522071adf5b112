"""Checks of a GPU's side of exact mode on a CPU: vLLM's kernels in Triton's interpreter, in a process of
their own."""

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

from verl_rc.runtime.distributed.process_group import leave_trainer_group
from verl_rc.runtime.exact import gpu_engine, gpu_kernels
from verl_rc.runtime.exact.captured_trainer import CapturedTrainer, ComparedOperation
from verl_rc.runtime.exact.operations import require_batch_invariance
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.language_model import Products, load_causal_lm

LENGTHS = [1, 45, 7]
DECODED = (0, 15, 16, 31, 32, 44)
"""Positions of the second sequence: where a block of the engine's or the trainer's cache begins or ends."""
SCALING = 0.25
BLOCK = 16
"""Tokens of a block of the engine's cache: half those of the trainer's."""


def heads(kv_heads: int) -> list[Tensor]:
    return [torch.randn(sum(LENGTHS), count, 32) for count in (4, kv_heads, kv_heads)]


def decoded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The ``DECODED`` rows: one query at a time, over a cache of smaller blocks."""
    cache = torch.full((4, BLOCK, key.shape[1], 2 * 32), torch.nan)
    keys, values = cache.split(32, -1)
    table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    query, key, value = (states.split(LENGTHS)[1] for states in (query, key, value))
    rows = []
    for place in range(LENGTHS[1]):
        slot = table[0, place // BLOCK], place % BLOCK
        cache[slot] = torch.cat([key[place], value[place]], -1)
        if place not in DECODED:
            continue
        output = torch.empty(1, *query.shape[1:])
        unified_attention(
            q=query[place, None],
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
    torch.manual_seed(0)
    result: dict[str, Any] = {"error": 0.0, "alone": True, "decoded": True}
    lengths = torch.tensor(LENGTHS)
    for kv_heads in (1, 2, 4):
        states = heads(kv_heads)
        output = gpu_kernels.attend(*states, lengths, SCALING)
        alone = [
            gpu_kernels.attend(*sequence, torch.tensor([len(sequence[0])]), SCALING)
            for sequence in zip(*(tensor.split(LENGTHS) for tensor in states), strict=True)
        ]
        error = float((output - attended(*states, LENGTHS, SCALING)).abs().max())
        result["error"] = max(result["error"], error)
        result["alone"] &= torch.equal(torch.cat(alone), output)
        result["decoded"] &= torch.equal(decoded(*states), output.split(LENGTHS)[1][list(DECODED)])
    return result


def layers() -> dict[str, Any]:
    """Linear layer, norm and rotary frequencies of trainer and engine."""
    torch.manual_seed(0)
    x, residual, weight, scale = (torch.randn(*shape) for shape in ((20, 48), (20, 48), (64, 48), (48,)))
    require_batch_invariance({(48, 64)}, torch.float32, gpu_kernels.linear, "cpu")
    gradients = []
    for multiply in (gpu_kernels.linear, F.linear):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        gradients.append(torch.autograd.grad((multiply(*inputs) * torch.arange(64.0)).sum(), inputs))
    layer = nn.Linear(48, 64, bias=False)
    with patch.object(engine_linear, "current_platform", SimpleNamespace(is_cuda_alike=lambda: True)):
        engine_product = engine_linear.UnquantizedLinearMethod().apply(layer, x, None)
    gpu_engine.use_trainer_operations()
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(48)
        norm.weight.data = scale
        normalised, total = norm.forward_cuda(x, residual)
    with torch.device("meta"):
        frequencies = RotaryEmbedding._compute_inv_freq(SimpleNamespace(rotary_dim=8), 10.0)
    return {
        "engine": torch.equal(engine_product, gpu_kernels.linear(x, layer.weight)),
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
        policy = load_causal_lm(
            folder, torch.float32, products=Products(exact_dtype=torch.float32 if exact else None)
        )
        scores = score(policy, tokens)
        log_probs.append(scores.log_probs)
        weights = torch.linspace(-1.0, 1.0, scores.log_probs.numel())
        (scores.log_probs.flatten() * weights).sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
        if exact:
            rows = [score(policy, tokens[row : row + 1]).log_probs[0] for row in range(3)]
    pairs = zip(*gradients, strict=True)
    return {
        "alone": torch.equal(torch.stack(rows), log_probs[0]),
        "same": torch.equal(*log_probs),
        "error": float((log_probs[0] - log_probs[1]).detach().abs().max()),
        "gradient error": max(float((exact - ordinary).abs().max()) for exact, ordinary in pairs),
    }


class Checks:
    """What the process is asked for."""

    attention = staticmethod(attention)
    layers = staticmethod(layers)
    model = staticmethod(model)

    def compare(
        self, folder: str, prompts: list[list[int]], file: str, exact: bool
    ) -> list[ComparedOperation]:
        """A trainer with an engine's ``file``."""
        try:
            return CapturedTrainer(folder, "float32", exact).compare(prompts, file)
        finally:
            leave_trainer_group()
