"""The tensors that differ between an engine's weights and a trainer's, by a digest of each.

An engine writes digests of what it holds at any time, in its own process:
``llm.apply_model(partial(write_digests, path="engine.json"))`` with vLLM. Its fused tensors are compared with
the trainer's parts behind one another, in the engine's dtype.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from torch import Tensor, nn

from verl_rc.runtime.weight_sync.manifest import TensorSpec, tensor_digest
from verl_rc.runtime.workers.export import export_checkpoint

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of tensors in vLLM, and of their parts in a model folder, in order."""
_MOST_NAMED = 8


@dataclass(frozen=True)
class TensorDigest(TensorSpec):
    """A tensor and the digest of its bytes: an entry of a file of digests."""

    digest: int

    @classmethod
    def from_tensor(cls, name: str, tensor: Tensor) -> "TensorDigest":
        """The digest of a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(tensor.shape), tensor_digest(tensor))


@dataclass(frozen=True)
class Comparison:
    """Names of the compared tensors, in the order of the first side."""

    equal: tuple[str, ...]
    differing: tuple[str, ...]
    unknown: tuple[str, ...]
    """Tensors that the second side lacks, or has in another shape."""

    def lines(self) -> Iterator[str]:
        """The first tensors that differ, for the console."""
        count = len(self.equal) + len(self.differing)
        yield f"{len(self.differing)} of {count} tensors differ"
        for title, names in (("differs", self.differing), ("not compared", self.unknown)):
            yield from (f"  {title}: {name}" for name in names[:_MOST_NAMED])
            if len(names) > _MOST_NAMED:
                yield f"  {title}: {len(names) - _MOST_NAMED} more"


def write_digests(model: nn.Module, path: str) -> None:
    """Write digests of all parameters that a process holds, whole or its shards."""
    digests = [asdict(TensorDigest.from_tensor(*item)) for item in model.named_parameters()]
    Path(path).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def compare_weights(first: Path, second: Path) -> Comparison:
    """Compare the tensors of ``first``, a file of ``write_digests``, a model folder or a checkpoint of
    a run, with those of a model folder or checkpoint.

    Raises:
        ValueError: a side is none of these.
        ExportError: a checkpoint cannot be read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        second_tensors = _tensors_of(second, Path(scratch) / "second")
        digests = (
            _read(first)
            if first.is_file()
            else [
                TensorDigest.from_tensor(*item)
                for item in _tensors_of(first, Path(scratch) / "first").items()
            ]
        )
        outcomes = {digest.name: _is_equal(digest, second_tensors) for digest in digests}
    equal, differing, unknown = (
        tuple(name for name, outcome in outcomes.items() if outcome is value) for value in (True, False, None)
    )
    return Comparison(equal, differing, unknown)


def _read(path: Path) -> list[TensorDigest]:
    try:
        return TypeAdapter(list[TensorDigest]).validate_json(path.read_bytes())
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} must be a file that write_digests wrote: {reason}") from error


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


def _is_equal(digest: TensorDigest, tensors: Mapping[str, Tensor]) -> bool | None:
    """Whether the same tensor of the second side has this digest; None where it has none of that shape."""
    fused = next((name for name in _FUSED if f".{name}." in digest.name), None)
    names = [digest.name] if fused is None else [digest.name.replace(fused, part) for part in _FUSED[fused]]
    if not all(name in tensors for name in names) or not hasattr(torch, digest.dtype):
        return None
    tensor = torch.cat([tensors[name] for name in names]) if fused else tensors[names[0]]
    padding = digest.shape[0] - tensor.shape[0] if tensor.dim() and digest.shape else 0
    if padding > 0:  # the engine pads the vocabulary
        tensor = torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])])
    if tuple(tensor.shape) != digest.shape:
        return None
    return tensor_digest(tensor.to(digest.torch_dtype)) == digest.digest
