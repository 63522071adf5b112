"""The state of an optimizer and its schedule by parameter name, for saving and loading as shards.

``torch.distributed.checkpoint.state_dict`` is not used: it takes an optimizer step when there is no state yet, so Adam's step
count stays one too high, and it cannot load when a parameter has no state.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def optimized_names(tensors: Mapping[str, Tensor], optimizer: Optimizer) -> list[str]:
    """Names of the optimizer's parameters in its own order. Raises ``ValueError`` for one that is not in ``tensors``."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in names for parameter in parameters)
    if foreign:
        raise ValueError(
            f"the optimizer must step parameters of the given model, but {foreign} of {len(parameters)} are of another. "
            "Build it after the model is sharded."
        )
    return [names[id(parameter)] for parameter in parameters]


def state_tensors(tensors: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """``<parameter>.<state>`` to tensor; empty before the first step."""
    return {
        f"{name}.{key}": value
        for name in optimized_names(tensors, optimizer)
        for key, value in optimizer.state.get(tensors[name], {}).items()
    }


def empty_state_tensors(tensors: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """Zeros to load the ``saved`` state into: sharded like the parameter when they have its shape, else unsharded."""
    empty = {}
    for full_name, entry in saved.items():
        parameter = tensors[full_name.rpartition(".")[0]].detach()
        if entry.size == parameter.shape:
            empty[full_name] = torch.zeros_like(parameter, dtype=entry.properties.dtype)
        else:
            empty[full_name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    return empty


def set_state_tensors(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], learning_rates: Sequence[float]
) -> None:
    """Replace the optimizer's state, all of it, and its learning rates; the other hyper-parameters stay as they are."""
    position = {name: index for index, name in enumerate(optimized_names(tensors, optimizer))}
    by_position: dict[int, dict[str, Tensor]] = {}
    for full_name, value in state.items():
        name, _, key = full_name.rpartition(".")
        by_position.setdefault(position[name], {})[key] = value
    plain = optimizer.state_dict()
    groups = [{**group, "lr": rate} for group, rate in zip(plain["param_groups"], learning_rates, strict=True)]
    optimizer.load_state_dict({"state": by_position, "param_groups": groups})


def schedule_state(scheduler: LambdaLR) -> dict[str, int]:
    """The position of the schedule, as JSON data."""
    return {"num_steps": int(scheduler.last_epoch)}


def resume_schedule(scheduler: LambdaLR, state: dict[str, int]) -> None:
    """Set a new ``scheduler`` and its optimizer to the position saved by ``schedule_state``.

    Unlike ``load_state_dict`` this keeps the peak rates of the given scheduler, so that a rate changed for the resumed
    run has its effect, and it sets the optimizer's rates.
    """
    num_steps = state["num_steps"]
    rates = [base * factor(num_steps) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict(
        {**scheduler.state_dict(), "last_epoch": num_steps, "_step_count": num_steps + 1, "_last_lr": rates}
    )
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
