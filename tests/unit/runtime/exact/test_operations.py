"""The linear layer of both sides: rows do not depend on the batch; a CPU on which they do is found out."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verl_rc.runtime import exact
from verl_rc.runtime.exact import InexactError, fix_summation_order, operations
from verl_rc.runtime.exact.operations import linear, require_batch_invariance
from verl_rc.runtime.workers.environment import engine_environment, trainer_environment


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 17])
def test_rows_do_not_depend_on_the_batch(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((40, 192), (512, 192), (512,)))
    whole = linear(x, weight, bias)
    assert torch.equal(linear(x[:rows], weight, bias), whole[:rows])
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), exact, rtol=0.02, atol=1e-4 if dtype == torch.float32 else 0.2)


def test_shape_and_gradient_are_those_of_a_linear_layer() -> None:
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 6), (3, 6), (3,))
    )
    inputs = [x, weight, bias]
    found = torch.autograd.grad(linear(x, weight, bias).square().sum(), inputs)
    expected = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rows", [16, 64])
def test_a_cpu_whose_products_depend_on_the_batch_is_refused(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = F.linear

    def depends(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = plain(x, weight, bias)
        return product + 1e-6 if len(x) == rows and weight.shape[0] == 48 else product

    require_batch_invariance({(32, 64), (32, 48)}, torch.float32)
    monkeypatch.setattr(operations.F, "linear", depends)
    require_batch_invariance({(32, 64)}, torch.float32)
    with pytest.raises(InexactError, match=r"32 inputs and 48 outputs in torch\.float32"):
        require_batch_invariance({(32, 64), (32, 48)}, torch.float32)


@pytest.mark.parametrize("inputs", [64, 65])
def test_sums_in_another_order_are_seen_in_bfloat16(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.linear

    def add(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, weight = x.float(), weight.float()
        parts = (32, inputs - 32) if len(x) == splits_at else (inputs,)
        sums = map(plain, x.split(parts, 1), weight.split(parts, 1))
        return sum(sums, torch.zeros(())).to(torch.bfloat16)

    splits_at = 0
    monkeypatch.setattr(operations.F, "linear", add)
    require_batch_invariance({(inputs, 16)}, torch.bfloat16)
    splits_at = 64
    # Rounded to 8 bits nearly all sums of other numbers are equal.
    with pytest.raises(InexactError, match=r"\d{3,4} numbers of a layer"):
        require_batch_invariance({(inputs, 16)}, torch.bfloat16)


MULTIPLY = """
import torch
import tensordict  # loads MKL
from verl_rc.runtime.exact.operations import require_batch_invariance
torch.set_num_threads(2)
require_batch_invariance({(512, 192), (1024, 1024), (2432, 896)}, torch.bfloat16)
require_batch_invariance({(1024, 1024), (2432, 896)}, torch.float32)
"""


def test_libraries_that_choose_a_split_by_the_rows_are_held_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # A CPU with AMX splits sums of bfloat16, and MKL those of float32 for two threads.
    for name in exact.EXACT_ENVIRONMENT["cpu"]:
        monkeypatch.delenv(name, raising=False)
    fix_summation_order("cpu")
    environment = {**os.environ, **trainer_environment(2, one_node=True)}
    result = subprocess.run(
        [sys.executable, "-c", MULTIPLY], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-1000:]


def test_both_sides_get_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact.os, "environ", {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    ends = [partial(trainer_environment, 1), partial(engine_environment, 1, "cpu")]
    assert all("MKL_CBWR" not in end(one_node=False) for end in ends)
    fix_summation_order("cpu")
    held = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AUTO,STRICT"}
    assert all(held.items() <= end(one_node=False).items() for end in ends)
