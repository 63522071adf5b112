"""An optimizer and its schedule go on where they stopped."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from verl_rc.runtime.checkpoint.shards import (
    empty_state_tensors,
    optimized_names,
    resume_schedule,
    schedule_state,
    set_state_tensors,
    state_tensors,
)


def build() -> tuple[dict[str, nn.Parameter], AdamW]:
    named = {
        name: nn.Parameter(torch.arange(float(size)))
        for name, size in (("a.x", 2), ("a.y", 3), ("unused", 4))
    }
    groups = [{"params": [named["a.y"]], "lr": 0.1}, {"params": [named["unused"], named["a.x"]], "lr": 0.2}]
    return named, AdamW(groups, weight_decay=0.5)


def step(named: dict[str, nn.Parameter], optimizer: AdamW) -> None:
    named["a.x"].grad, named["a.y"].grad = torch.ones(2), torch.full((3,), 2.0)
    optimizer.step()


def test_names_follow_the_optimizers_order() -> None:
    named, optimizer = build()
    assert optimized_names(named, optimizer) == ["a.y", "unused", "a.x"]


def test_parameters_of_another_model() -> None:
    named, optimizer = build()
    del named["unused"]
    with pytest.raises(ValueError, match="1 of 3 are of another"):
        optimized_names(named, optimizer)


def test_state_goes_by_name_and_only_where_there_is_one() -> None:
    named, optimizer = build()
    assert state_tensors(named, optimizer) == {}
    step(named, optimizer)
    state = state_tensors(named, optimizer)
    assert state.keys() == {
        f"a.{letter}.{key}" for letter in "xy" for key in ("step", "exp_avg", "exp_avg_sq")
    }
    torch.testing.assert_close(state["a.y.exp_avg"], torch.full((3,), 0.2))


def test_a_state_is_put_back_whole() -> None:
    named, optimizer = build()
    step(named, optimizer)
    saved = {name: value.clone() for name, value in state_tensors(named, optimizer).items()}
    values = {name: parameter.detach().clone() for name, parameter in named.items()}
    step(named, optimizer)
    expected = {name: parameter.detach().clone() for name, parameter in named.items()}

    named, optimizer = build()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    named["unused"].grad = torch.ones(4)
    step(named, optimizer)
    for name, parameter in named.items():
        parameter.data.copy_(values[name])
    named["unused"].grad = None
    set_state_tensors(optimizer, named, saved, [0.1, 0.2])
    assert named["unused"] not in optimizer.state
    step(named, optimizer)
    assert all(torch.equal(named[name], expected[name]) for name in named)


def test_learning_rates_are_set_and_nothing_else() -> None:
    named, optimizer = build()
    set_state_tensors(optimizer, named, {}, [0.3, 0.4])
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.4]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_room_for_a_saved_state() -> None:
    named, _ = build()
    saved = {
        "a.x.exp_avg": TensorStorageMetadata(TensorProperties(torch.float64), torch.Size([2]), []),
        "a.x.step": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([]), []),
    }
    empty = empty_state_tensors(named, saved)
    assert {name: (tuple(t.shape), t.dtype) for name, t in empty.items()} == {
        "a.x.exp_avg": ((2,), torch.float64),
        "a.x.step": ((), torch.float32),
    }
    assert not any(t.requires_grad or t.any() for t in empty.values())


def build_schedule(lr: float) -> LambdaLR:
    return LambdaLR(AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr), lambda step: 1 / (step + 3))


def advance(scheduler: LambdaLR, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


def test_the_schedule_goes_on() -> None:
    whole = build_schedule(0.1)
    expected = advance(whole, 5)
    first = build_schedule(0.1)
    advance(first, 2)
    second = build_schedule(0.1)
    resume_schedule(second, json.loads(json.dumps(schedule_state(first))))
    assert second.optimizer.param_groups[0]["lr"] == expected[1] == second.get_last_lr()[0]
    assert advance(second, 3) == expected[2:]


def test_a_new_peak_rate_has_its_effect() -> None:
    second = build_schedule(0.2)
    resume_schedule(second, {"num_steps": 2})
    assert second.get_last_lr() == [0.2 * (1 / 5)]
    assert advance(second, 1) == [pytest.approx(0.2 / 6)]
