"""vLLM's attention, one query at a time, against a loop in float64; a vLLM that has moved is refused."""

import re

import pytest
import torch
from attention_loop import attended

from verl_rc.runtime.exact import InexactError, cpu_kernels

LENGTHS = [1, 150, 7]


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    cpu_kernels.require_vllm()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_attention_within_each_sequence(kv_heads: int) -> None:
    query, key, value = (torch.randn(sum(LENGTHS), heads, 32) for heads in (4, kv_heads, kv_heads))
    found = cpu_kernels.attend(query, key, value, torch.tensor(LENGTHS), 0.25)
    expected = attended(query, key, value, LENGTHS, 0.25)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(sum(LENGTHS), heads, 32).to(dtype) for heads in (4, 2, 2))
    whole = cpu_kernels.attend(query, key, value, torch.tensor(LENGTHS), 0.25)
    parts = [
        cpu_kernels.attend(*three, torch.tensor([len(three[0])]), 0.25)
        for three in zip(*(tensor.split(LENGTHS) for tensor in (query, key, value)), strict=True)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert not whole.isnan().any()


@pytest.mark.parametrize(
    ("operation", "arguments", "problem"),
    [
        (
            "vllm._custom_ops:cpu_attention_with_kv_cache",
            "query rotation",
            "cpu_attention_with_kv_cache with rotation",
        ),
        ("vllm.model_executor.layers.layernorm:NoNorm.forward", "", "NoNorm.forward, which has none"),
        ("vllm.gone:function", "", "vllm.gone:function, which has none"),
    ],
)
def test_internals_of_vllm_that_moved_are_named(
    operation: str, arguments: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cpu_kernels, "_NEEDED_FUNCTIONS", {**cpu_kernels._NEEDED_FUNCTIONS, operation: arguments}
    )
    with pytest.raises(InexactError, match=re.escape(problem)):
        cpu_kernels.require_vllm.__wrapped__()
