import json

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from verl_rc.checkpoint.optimizer_state import resume_schedule, schedule_state


def build(lr: float) -> LambdaLR:
    return LambdaLR(AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr), lambda step: 1 / (step + 3))


def advance(scheduler: LambdaLR, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


def test_the_schedule_goes_on() -> None:
    whole = build(0.1)
    expected = advance(whole, 5)
    first = build(0.1)
    advance(first, 2)
    second = build(0.1)
    resume_schedule(second, json.loads(json.dumps(schedule_state(first))))
    assert second.optimizer.param_groups[0]["lr"] == expected[1] == second.get_last_lr()[0]
    assert advance(second, 3) == expected[2:]


def test_a_new_peak_rate_has_its_effect() -> None:
    second = build(0.2)
    resume_schedule(second, {"num_steps": 2})
    assert second.get_last_lr() == [0.2 * (1 / 5)]
    assert advance(second, 1) == [pytest.approx(0.2 / 6)]
