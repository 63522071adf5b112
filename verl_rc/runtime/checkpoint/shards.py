"""Saving and loading a model and its optimizer as shards, bitwise, on any number of ranks, optionally in the
background.

The tensors are written by torch.distributed.checkpoint (DCP), each once, under the name of its parameter. Its
``state_dict`` module is not used for the optimizer: it takes an optimizer step when there is no state yet, so
Adam's step count stays one too high, and it cannot load when a parameter has no state.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl_rc.config.errors import listed
from verl_rc.runtime.checkpoint import saved_files
from verl_rc.runtime.checkpoint.checksums import FileSum, write_checksums
from verl_rc.runtime.checkpoint.shard_folder import (
    HEADER_FILE,
    MODEL,
    OPTIMIZER,
    ShardHeader,
    read_metadata,
    read_tensors,
    saved_tensors,
    write_tensors,
)
from verl_rc.runtime.checkpoint.store import CheckpointError, sync

Value = TypeVar("Value")


def optimized_names(tensors: Mapping[str, Tensor], optimizer: Optimizer) -> list[str]:
    """Names of the optimizer's parameters in its own order. Raises ``ValueError`` for one that is not in
    ``tensors``."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in names for parameter in parameters)
    if foreign:
        raise ValueError(
            f"the optimizer must step parameters of the given model, but {foreign} of {len(parameters)} are "
            "of another. Build it after the model is sharded."
        )
    return [names[id(parameter)] for parameter in parameters]


def state_tensors(tensors: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """``<parameter>.<state>`` to tensor; empty before the first step."""
    return {
        f"{name}.{key}": value
        for name in optimized_names(tensors, optimizer)
        for key, value in optimizer.state.get(tensors[name], {}).items()
    }


def empty_state_tensors(
    tensors: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Zeros to load the ``saved`` state into: sharded like the parameter when they have its shape, else
    unsharded."""
    empty = {}
    for full_name, entry in saved.items():
        parameter = tensors[full_name.rpartition(".")[0]].detach()
        if entry.size == parameter.shape:
            empty[full_name] = torch.zeros_like(parameter, dtype=entry.properties.dtype)
        else:
            empty[full_name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    return empty


def set_state_tensors(
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    learning_rates: Sequence[float],
) -> None:
    """Replace the optimizer's state, all of it, and its learning rates; the other hyper-parameters stay as
    they are."""
    position = {name: index for index, name in enumerate(optimized_names(tensors, optimizer))}
    by_position: dict[int, dict[str, Tensor]] = {}
    for full_name, value in state.items():
        name, _, key = full_name.rpartition(".")
        by_position.setdefault(position[name], {})[key] = value
    plain = optimizer.state_dict()
    groups = [
        {**group, "lr": rate} for group, rate in zip(plain["param_groups"], learning_rates, strict=True)
    ]
    optimizer.load_state_dict({"state": by_position, "param_groups": groups})


def schedule_state(scheduler: LambdaLR) -> dict[str, int]:
    """The position of the schedule, as JSON data."""
    return {"num_steps": int(scheduler.last_epoch)}


def resume_schedule(scheduler: LambdaLR, state: dict[str, int]) -> None:
    """Set a new ``scheduler`` and its optimizer to the position saved by ``schedule_state``.

    Unlike ``load_state_dict`` this keeps the peak rates of the given scheduler, so that a rate changed for
    the resumed run has its effect, and it sets the optimizer's rates.
    """
    num_steps = state["num_steps"]
    rates = [
        base * factor(num_steps)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    scheduler.load_state_dict(
        {**scheduler.state_dict(), "last_epoch": num_steps, "_step_count": num_steps + 1, "_last_lr": rates}
    )
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def get_random_state() -> dict[str, Tensor]:
    """The random states of torch's CPU generator and of this process's CUDA device, if it uses one."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def read_random_state(path: Path) -> dict[str, Tensor]:
    """Read the random states of this rank; empty when none were saved. Raises ``CheckpointError`` for a
    broken file."""
    return saved_files.read_tensors(path, "random states") if path.exists() else {}


def set_random_state(state: dict[str, Tensor]) -> None:
    """Restore the generators that ``state`` names and this machine has."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@dataclass(frozen=True)
class Shards:
    """The data that one rank writes; its tensors are references to model and optimizer, not copies."""

    tensors: dict[str, Tensor]
    header: ShardHeader
    random_state: dict[str, Tensor]


def collect_shards(
    model: nn.Module, optimizer: Optimizer, extra: dict[str, Any], leave_out_frozen: bool = False
) -> Shards:
    """This rank's part of ``model`` and ``optimizer``, its random state, and ``extra`` (JSON data).

    ``leave_out_frozen`` skips parameters without gradient: with LoRA, those of the base model, which is on
    disk already.
    """
    named = named_tensors(model)
    tensors = {
        MODEL + name: tensor.detach()
        for name, tensor in named.items()
        if not (leave_out_frozen and is_frozen(tensor))
    }
    tensors |= {OPTIMIZER + name: tensor for name, tensor in state_tensors(named, optimizer).items()}
    header = ShardHeader(
        frozen_left_out=leave_out_frozen,
        optimizer_parameters=optimized_names(named, optimizer),
        learning_rates=[float(group["lr"]) for group in optimizer.param_groups],
        extra=extra,
    )
    return Shards(tensors, header, get_random_state())


def write_shards(folder: Path, shards: Shards, group: dist.ProcessGroup | None = None) -> None:
    """Write the shards of every rank, and last their checksums, and sync them to disk; a collective of
    ``group`` (None: the default group).

    Raises ``CheckpointError`` on every rank when one cannot write, or when ``folder`` holds shards already.
    """
    with _raise_on_all_ranks(group):
        folder.mkdir(parents=True, exist_ok=True)
        if _rank() == 0:
            shards.header.write(folder)
            sync(folder / HEADER_FILE)
        torch.save(shards.random_state, _random_file(folder))
        sync(_random_file(folder))
    sums = write_tensors(folder, shards.tensors, group)
    with _raise_on_all_ranks(group):
        sums[_random_file(folder).name] = FileSum.of(_random_file(folder))
        if _rank() == 0:
            sums[HEADER_FILE] = FileSum.of(folder / HEADER_FILE)
    all_sums = _of_ranks(sums, group)
    with _raise_on_all_ranks(group):
        if _rank() == 0:
            write_checksums(folder, {name: found for part in all_sums for name, found in part.items()})


def load_shards(folder: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Fill ``model`` and ``optimizer`` in place from ``folder``; a collective of all ranks. Returns
    ``extra``.

    Learning rates come back as saved; all other hyper-parameters stay those of the given ``optimizer``.
    Random states come back on ranks that existed when they were saved. Raises ``CheckpointError`` on every
    rank, before anything is changed, for a folder that cannot be read or that holds another model.
    """
    named = named_tensors(model)
    with _raise_on_all_ranks():
        header, metadata = ShardHeader.read(folder), read_metadata(folder)
        saved_model, saved_state = saved_tensors(metadata, MODEL), saved_tensors(metadata, OPTIMIZER)
        if differences := _differences(named, saved_model, optimizer, header):
            raise CheckpointError(
                f"{folder} must hold the model that is trained, but {'; '.join(differences)}. Restore the "
                "model settings of the run that saved it, or start anew with trainer.resume_mode=disable."
            )
        random_state = read_random_state(_random_file(folder))
    tensors = {MODEL + name: named[name].detach() for name in saved_model}
    state = empty_state_tensors(named, saved_state)
    tensors |= {OPTIMIZER + name: tensor for name, tensor in state.items()}
    read_tensors(folder, metadata, tensors, collective=dist.is_initialized())
    set_state_tensors(optimizer, named, state, header.learning_rates)
    set_random_state(random_state)
    return header.extra


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each once: a shared tensor is listed under its first name.

    Sharded parameters are listed as shards. FSDP2 keeps some of them unsharded after a forward pass;
    ``state_dict`` reshards them first, ``named_parameters`` does not.
    """
    first_names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and first_names.setdefault(id(tensor), name) == name:
            tensors[name] = tensor
    return tensors


def is_frozen(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter that is not trained."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _differences(
    named: Mapping[str, Tensor],
    saved: Mapping[str, TensorStorageMetadata],
    optimizer: Optimizer,
    header: ShardHeader,
) -> list[str]:
    """Differences between a folder's model and optimizer and those given, in words that follow "but"."""
    expected = {name for name, tensor in named.items() if not (header.frozen_left_out and is_frozen(tensor))}
    shapes = [
        f"{name} {list(saved[name].size)} instead of {list(named[name].shape)}"
        for name in sorted(named.keys() & saved.keys())
        if saved[name].size != named[name].shape
    ]
    stepped, saved_stepped = set(optimized_names(named, optimizer)), set(header.optimizer_parameters)
    names_by_words = {
        "it lacks": sorted(expected - saved.keys()),
        "it has in addition": sorted(saved.keys() - named.keys()),
        "it has in another shape": shapes,
        "its optimizer does not step": sorted(stepped - saved_stepped),
        "its optimizer steps in addition": sorted(saved_stepped - stepped),
    }
    differences = [f"{words} {listed(names)}" for words, names in names_by_words.items() if names]
    groups, saved_groups = len(optimizer.param_groups), len(header.learning_rates)
    if groups != saved_groups:
        differences.append(f"its optimizer has {saved_groups} parameter group(s) instead of {groups}")
    return differences


@contextmanager
def _raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turn a failure of any type on any rank into a ``CheckpointError`` on all ranks, so that none waits in a
    collective."""
    try:
        yield
    except Exception as error:
        problem = str(error) if isinstance(error, (CheckpointError, OSError)) else repr(error)
        raise CheckpointError(_problems_of_ranks(problem, group)) from error
    if problems := _problems_of_ranks(None, group):
        raise CheckpointError(problems)


def _problems_of_ranks(problem: str | None, group: dist.ProcessGroup | None) -> str:
    """The problems of all ranks, each once; empty when none has any. Collective."""
    return " ".join(sorted({text for text in _of_ranks(problem, group) if text is not None}))


def _of_ranks(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """The values of all ranks. Collective."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value, group=group)
    return values


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _random_file(folder: Path) -> Path:
    return folder / f"random_state_{_rank()}.pt"


class BackgroundWriter:
    """Writes one set of shards at a time while training continues.

    The copy stays allocated in host memory for the next save: 12 bytes per parameter for fp32 weights and
    Adam's two moments.
    """

    def __init__(self, pin_memory: bool) -> None:
        """Collective: creates a separate process group for the writing threads, since a group serves one
        thread at a time.

        ``pin_memory``: use page-locked memory, which makes copies from a GPU faster.
        """
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pin_memory,
                use_non_blocking_copy=pin_memory,
                use_shared_memory=False,
                use_async_staging=False,
            )
        )
        self._writing: Future[None] | None = None

    def start(self, folder: Path, shards: Shards) -> None:
        """Copy ``shards`` now and write them to ``folder`` in the background, after a write in progress;
        collective."""
        self.is_finished(wait=True)
        tensors: Any = self._stager.stage(shards.tensors)  # a future only with use_async_staging
        self._writing = self._thread.submit(
            write_shards, folder, replace(shards, tensors=tensors), self._group
        )

    def is_finished(self, wait: bool) -> bool:
        """Whether no write is in progress; with ``wait``, block until then. Raises the ``CheckpointError`` of
        a failed write."""
        if self._writing is None:
            return True
        if not wait and not self._writing.done():
            return False
        ended, self._writing = self._writing, None
        ended.result()
        return True
