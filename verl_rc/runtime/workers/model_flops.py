"""The FLOPs that a model needs for its tokens, and those that a rank's device can do (MFU, arXiv:2204.02311,
appendix B)."""

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.runtime.workers.experts import idle_share

_PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200 NVL": 8.36e14,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "H800": 9.89e14,
    "H20": 1.48e14,
    "A100": 3.12e14,
    "A800": 3.12e14,
    "L40S": 3.62e14,
    "L40": 1.81e14,
    "RTX 4090": 1.65e14,
    "L4": 1.21e14,
}
"""Dense 16-bit FLOPs per second by words of the device's name, from the vendor's data sheets; the first that
fits counts."""
_SIZE, _REPETITIONS = 1024, 5
_TOWER = "visual."


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model's forward pass over whole sequences, and of a rank's device."""

    per_token: float
    """Two for each weight that a token is multiplied with: without embeddings that are looked up, experts
    that the token does not take, and a vision tower."""
    per_pair: Mapping[int | None, int]
    """FLOPs for a token and one that it attends to, of all layers with the same window. None: no window."""
    peak: float
    """FLOPs per second of one rank's device in the model's precision."""

    def of_forward(self, lengths: Tensor) -> float:
        """FLOPs for sequences of ``lengths`` ``[B]`` tokens, each from its beginning."""
        lengths, flops = lengths.double(), self.per_token * float(lengths.sum())
        for window, per_pair in self.per_pair.items():
            within = lengths if window is None else lengths.clamp(max=window)
            pairs = within * (within + 1) / 2 + (lengths - within) * within
            flops += per_pair * float(pairs.sum())
        return flops


def count_flops(model: nn.Module, dtype: torch.dtype, device: torch.device) -> ModelFlops:
    """Count those of a model that computes in ``dtype`` on ``device``."""
    language_model: Any = model
    source = language_model.config
    text, active = source.get_text_config(), 1.0 - idle_share(source)
    looked_up, head = language_model.get_input_embeddings().weight, language_model.get_output_embeddings()
    if head is not None and head.weight is looked_up:
        looked_up = None
    weights = sum(
        weight.numel() * (active if ".experts." in name else 1.0)
        for name, weight in model.named_parameters()
        if weight is not looked_up and weight.dim() > 1 and _TOWER not in name
    )
    window = getattr(text, "sliding_window", None)
    layers = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    counts = Counter(
        window if kind == "sliding_attention" else None for kind in layers if kind != "linear_attention"
    )
    # Two for a product of query and key, and two for one of probability and value.
    per_pair = {key: 4 * count * text.num_attention_heads * head_size for key, count in counts.items()}
    return ModelFlops(2.0 * weights, per_pair, _peak(dtype, device))


def _peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOPs per second of the data sheet, or else of the fastest of some products."""
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for words, peak in _PEAKS.items():
            if re.search(rf"\b{words}\b", name):
                return peak
    factor = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    seconds = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        (factor @ factor)[0, 0].item()
        seconds.append(time.perf_counter() - started)
    return 2.0 * _SIZE**3 / min(seconds)
