"""FLOPs of a model against those that PyTorch counts of its products, and what devices can do."""

import pytest
import torch
from families import FULL, WINDOW, model_of
from torch.utils.flop_counter import FlopCounterMode

from verl_rc.runtime.workers.model_flops import ModelFlops, count_flops

CPU, LENGTH = torch.device("cpu"), 24


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [*FULL, "mistral", "olmo3"])
def test_a_forward_pass_has_the_products_that_torch_counts(family: str, tied: bool) -> None:
    """PyTorch counts products with keys that a mask hides: what a token cannot see is added here."""
    model = model_of(family, tied, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(LENGTH)[None], use_cache=False)
    flops = count_flops(model, torch.float32, CPU)
    every_pair = LENGTH**2 * sum(flops.per_pair.values())
    assert counter.get_total_flops() == pytest.approx(flops.per_token * LENGTH + every_pair, rel=1e-6)


def test_a_token_attends_to_those_before_it_and_within_its_window() -> None:
    flops = ModelFlops(100.0, {None: 4, WINDOW: 1}, peak=1.0)
    lengths = [1, WINDOW, 20]
    pairs = [
        sum(min(token, window) for length in lengths for token in range(1, length + 1))
        for window in (20, WINDOW)
    ]
    assert flops.of_forward(torch.tensor(lengths)) == 100.0 * sum(lengths) + 4 * pairs[0] + pairs[1]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H20", 1.48e14),
        ("NVIDIA H200", 9.89e14),
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA L40", 1.81e14),
        ("NVIDIA GeForce RTX 4090", 1.65e14),
    ],
)
def test_a_known_device_has_the_peak_of_its_data_sheet(
    name: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert count_flops(model_of("llama"), torch.bfloat16, torch.device("cuda")).peak == peak


def test_a_cpu_can_do_what_a_product_does() -> None:
    peak = count_flops(model_of("llama"), torch.float32, CPU).peak
    assert 1e8 < peak < 1e14
