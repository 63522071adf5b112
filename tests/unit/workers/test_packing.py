"""Models whose attention the trainer does not compute are refused, by their configuration and when they are called."""

import re
from typing import Any

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_next import Qwen3NextConfig

from verl_rc.workers.attention import PackedLayout, attention_problem, packed_sdpa

SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("config", "longest", "problem"),
    [
        (Qwen2Config(), 32_768, None),
        (Qwen2Config(sliding_window=4096), 32_768, None),  # switched off
        (Qwen2Config(**SLIDING), 4097, "sliding_window=4096 .* lower .* to 4096"),
        (Qwen2Config(**SLIDING), 4096, None),
        (Qwen3Config(), 32_768, None),
        (LlamaConfig(), 32_768, None),
        (MistralConfig(sliding_window=4096), 8192, "sliding_window=4096"),
        (MistralConfig(sliding_window=4096), 4096, None),
        (MistralConfig(sliding_window=None), 8192, None),
        (Phi3Config(sliding_window=2047), 4096, "sliding_window=2047"),
        (Gemma2Config(), 1024, "soft-capped"),
        (Gemma3TextConfig(sliding_window=512), 1024, "sliding_window=512"),
        (GptOssConfig(), 64, "sinks"),
        (Qwen3NextConfig(), 64, "linear_attention"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "model_type") else str(value),
)
def test_attention_that_is_not_built_is_refused_by_name(config: Any, longest: int, problem: str | None) -> None:
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
        ({"sliding_window": 3}, False),
        ({"sliding_window": 2}, True),
        ({"softcap": 50.0}, True),
        ({"s_aux": torch.zeros(1)}, True),
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
