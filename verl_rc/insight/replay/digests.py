"""Which tensors differ between an engine's weights and a trainer's, by a digest of each.

An engine writes digests of what it holds at any time, in its own process:
``llm.apply_model(partial(write_digests, path="engine.json"))`` with vLLM. Its fused tensors are compared with
the trainer's parts behind one another, in the engine's dtype.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from verl_rc.weight_sync.manifest import TensorSpec, tensor_digest
from verl_rc.workers.export import export_checkpoint

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of tensors in vLLM, and of their parts in a model folder, in order."""
_MOST_NAMED = 8

Digests = Mapping[str, tuple[TensorSpec, int]]


@dataclass(frozen=True)
class Comparison:
    """Tensors by what a comparison said of them, in the order of the first side."""

    equal: tuple[str, ...]
    differing: tuple[str, ...]
    unknown: tuple[str, ...]
    """That the other side lacks, or has in another shape."""

    def lines(self) -> Iterator[str]:
        """For the console: the first tensors that differ."""
        count = len(self.equal) + len(self.differing)
        yield f"{len(self.differing)} of {count} tensors differ"
        for title, names in (("differs", self.differing), ("not compared", self.unknown)):
            yield from (f"  {title}: {name}" for name in names[:_MOST_NAMED])
            if len(names) > _MOST_NAMED:
                yield f"  {title}: {len(names) - _MOST_NAMED} more"


def write_digests(model: nn.Module, path: str) -> None:
    """Write digests of all parameters that a process holds, whole or its shards."""
    entries = [
        {
            "name": name,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "shape": list(parameter.shape),
            "digest": tensor_digest(parameter),
        }
        for name, parameter in model.named_parameters()
    ]
    Path(path).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def compare_weights(first: Path, second: Path) -> Comparison:
    """Compare the tensors of ``first``, a file of ``write_digests``, a model folder or a checkpoint of
    a run, with those of a model folder or checkpoint.

    Raises:
        ValueError: a side is none of these.
        ExportError: a checkpoint cannot be read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _tensors_of(second, Path(scratch) / "second")
        if first.is_file():
            digests = _read(first)
        else:
            digests = {
                name: _digest(name, tensor)
                for name, tensor in _tensors_of(first, Path(scratch) / "first").items()
            }
        sides = [
            (name, spec, digest, _counterpart(spec, trainer)) for name, (spec, digest) in digests.items()
        ]
        compared = {
            name: digest == tensor_digest(other) for name, _, digest, other in sides if other is not None
        }
    return Comparison(
        tuple(name for name, is_equal in compared.items() if is_equal),
        tuple(name for name, is_equal in compared.items() if not is_equal),
        tuple(name for name in digests if name not in compared),
    )


def _digest(name: str, tensor: Tensor) -> tuple[TensorSpec, int]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tuple(tensor.shape)), tensor_digest(tensor)


def _read(path: Path) -> Digests:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {
            entry["name"]: (
                TensorSpec(entry["name"], entry["dtype"], tuple(entry["shape"])),
                int(entry["digest"]),
            )
            for entry in entries
        }
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} must be a file that write_digests wrote: {error}") from error


def _tensors_of(folder: Path, scratch: Path) -> dict[str, Tensor]:
    """The weights of a model folder, or of a checkpoint, which is exported first."""
    if not sorted(folder.glob("*.safetensors")):
        export_checkpoint(folder, scratch, dtype_name="float32")
        folder = scratch
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def _counterpart(spec: TensorSpec, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The tensor as the other side would hold it; None where it has none of that shape."""
    fused = next((name for name in _FUSED if f".{name}." in spec.name), None)
    names = [spec.name] if fused is None else [spec.name.replace(fused, part) for part in _FUSED[fused]]
    if not all(name in tensors for name in names) or not hasattr(torch, spec.dtype):
        return None
    whole = torch.cat([tensors[name] for name in names]) if fused else tensors[names[0]]
    rows = spec.shape[0] - whole.shape[0] if whole.dim() and spec.shape else 0
    if rows > 0:  # the engine pads the vocabulary
        whole = torch.cat([whole, whole.new_zeros(rows, *whole.shape[1:])])
    return whole.to(spec.torch_dtype) if tuple(whole.shape) == spec.shape else None
