"""Sequence parallelism by all-to-alls over attention heads (Ulysses, arXiv:2309.14509): a group of ranks
shares each micro-batch.

Every rank computes an equal part of the tokens, in attention an equal part of the heads over all tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_rc.tensor_ops import placed


@dataclass(frozen=True)
class SequenceParallel:
    """This rank's place in a group of ranks that have the same micro-batches."""

    group: dist.ProcessGroup
    rank: int
    size: int
    """Ranks of the group, at least 2."""

    def local_part(self, packed: Tensor) -> Tensor:
        """This rank's part ``[n, …]`` of ``packed`` ``[N, …]``, n = ceil(N / size); zeros follow the last
        token, so that parts are equal."""
        length = self._part_length(packed.shape[0])
        padding = (*(0, 0) * (packed.ndim - 1), 0, length * self.size - packed.shape[0])
        return F.pad(packed, padding)[self.rank * length : (self.rank + 1) * length]

    def local_positions(self, positions: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """A mask, bool ``[K]``, of the packed ``positions`` (int64 ``[K]``, below ``num_tokens``) in this
        rank's part; and their places there."""
        length = self._part_length(num_tokens)
        is_local = positions // length == self.rank
        return is_local, positions[is_local] - self.rank * length

    def gather(self, local: Tensor, is_local: Tensor) -> Tensor:
        """The values ``[K, …]`` of all ranks; this rank's are ``local``, at the places ``is_local`` (bool
        ``[K]``).

        Every rank must compute the same loss from the result. The gradient of a value then goes to its rank
        once.
        """
        # Each value is added to zeros, which rounds nothing.
        total: Tensor = _Sum.apply(placed(local, is_local), self.group)  # type: ignore[no-untyped-call]
        return total

    def heads_of_all_tokens(self, *projections: Tensor) -> list[Tensor]:
        """This rank's heads over all tokens ``[1, heads / size, size * n, D]`` of each projection, from all
        heads over this rank's tokens ``[1, heads, n, D]``.

        Heads are repeated until ``size`` divides their number.
        """
        # By destination rank; all projections travel in one exchange.
        outgoing = [_repeated_heads(part, self.size)[0].unflatten(0, (self.size, -1)) for part in projections]
        incoming = self._exchange(torch.cat([part.flatten(1) for part in outgoing], dim=1))
        widths = [part[0].numel() for part in outgoing]
        parts = zip(incoming.split(widths, dim=1), outgoing, strict=True)
        return [part.view_as(like).transpose(0, 1).flatten(1, 2)[None] for part, like in parts]

    def tokens_of_all_heads(self, attended: Tensor) -> Tensor:
        """All heads over this rank's tokens ``[1, n, heads, D]``, from its heads over all tokens ``[1, N,
        heads / size, D]``."""
        length = self._part_length(attended.shape[1])
        padded = F.pad(attended[0], (0, 0, 0, 0, 0, length * self.size - attended.shape[1]))
        incoming = self._exchange(padded.unflatten(0, (self.size, length)))
        return incoming.transpose(0, 1).flatten(1, 2)[None]

    def _part_length(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part i of rank j becomes part j of rank i; the gradients of the parts travel back."""
        exchanged: Tensor = funcol.wait_tensor(
            funcol.all_to_all_single_autograd(parts.contiguous(), None, None, self.group)
        )
        return exchanged


def divide_ranks(mesh: DeviceMesh, size: int) -> tuple[DeviceMesh, SequenceParallel | None]:
    """Data-parallel mesh and sequence-parallel group of this rank where ``size`` neighbouring ranks share a
    micro-batch.

    The mesh holds one rank of each group, so that sums over it count every row once. ``size`` must divide
    the number of ranks; with 1 there is no group.
    """
    if size == 1:
        return mesh, None
    names = ("data_parallel", "sequence_parallel")
    ranks = init_device_mesh(mesh.device_type, (mesh.size() // size, size), mesh_dim_names=names)
    group = ranks["sequence_parallel"].get_group()
    return ranks["data_parallel"], SequenceParallel(group, dist.get_rank(group), size)


def _repeated_heads(projection: Tensor, size: int) -> Tensor:
    """Each head of ``[1, heads, n, D]`` repeated so often that ``size`` divides the number of heads."""
    return projection.repeat_interleave(size // math.gcd(projection.shape[1], size), dim=1)


class _Sum(torch.autograd.Function):
    """The sum over ranks. Its gradient passes unchanged: every rank computes the same loss from the sum."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
