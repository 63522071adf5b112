"""Sequence parallelism by all-to-alls over attention heads (Ulysses, arXiv:2309.14509): a group of ranks
shares each micro-batch.

Every rank computes an equal part of its tokens, and in attention an equal part of the heads over all of them.
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

    def own_tokens(self, packed: Tensor) -> Tensor:
        """This rank's part ``[ceil(N / size), …]`` of ``packed`` ``[N, …]``; zeros follow the last token, so
        that parts are equal."""
        each = self._tokens_each(packed.shape[0])
        behind = (*(0, 0) * (packed.ndim - 1), 0, each * self.size - packed.shape[0])
        return F.pad(packed, behind)[self.rank * each : (self.rank + 1) * each]

    def own_positions(self, positions: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Which of the packed ``positions`` (int64 ``[K]``, below ``num_tokens``) lie in this rank's part,
        and where.

        Returns bool ``[K]``, and for those that do the positions in the part.
        """
        each = self._tokens_each(num_tokens)
        is_own = positions // each == self.rank
        return is_own, positions[is_own] - self.rank * each

    def gather(self, own: Tensor, is_own: Tensor) -> Tensor:
        """Values ``[K, …]`` of all ranks from this rank's ``own``, which lie where ``is_own`` (bool ``[K]``).

        Every rank is to compute the same loss from them. Its gradient goes to the rank that a value came
        from, once: of this rank's loss that is the gradient of its own values.
        """
        # Each value is added to zeros, which is exact.
        total: Tensor = _Sum.apply(placed(own, is_own), self.group)  # type: ignore[no-untyped-call]
        return total

    def heads_of_all_tokens(self, *projections: Tensor) -> list[Tensor]:
        """Own heads over all tokens ``[1, heads / size, size * n, D]`` from all heads over own tokens ``[1,
        heads, n, D]`` each.

        Heads of keys and values that are fewer than ranks, or do not divide, are repeated until they do.
        """
        # Laid out by the rank they go to; all projections travel in one exchange.
        sent = [_repeated_heads(part, self.size)[0].unflatten(0, (self.size, -1)) for part in projections]
        arrived = self._exchange(torch.cat([part.flatten(1) for part in sent], dim=1))
        widths = [part[0].numel() for part in sent]
        parts = zip(arrived.split(widths, dim=1), sent, strict=True)
        return [part.view_as(like).transpose(0, 1).flatten(1, 2)[None] for part, like in parts]

    def tokens_of_all_heads(self, attended: Tensor) -> Tensor:
        """All heads over own tokens ``[1, n, heads, D]`` from own heads over all tokens ``[1, N, heads /
        size, D]``."""
        each = self._tokens_each(attended.shape[1])
        padded = F.pad(attended[0], (0, 0, 0, 0, 0, each * self.size - attended.shape[1]))
        arrived = self._exchange(padded.unflatten(0, (self.size, each)))
        return arrived.transpose(0, 1).flatten(1, 2)[None]

    def _tokens_each(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part i of rank j becomes part j of rank i; the gradients of the parts travel back the same way."""
        exchanged: Tensor = funcol.wait_tensor(
            funcol.all_to_all_single_autograd(parts.contiguous(), None, None, self.group)
        )
        return exchanged


def divide_ranks(mesh: DeviceMesh, size: int) -> tuple[DeviceMesh, SequenceParallel | None]:
    """Data-parallel mesh and sequence-parallel group of this rank where ``size`` neighbouring ranks share a
    micro-batch.

    The mesh holds one rank of each group: sums over it count every row once. ``size`` must divide the ranks;
    None for 1.
    """
    if size == 1:
        return mesh, None
    names = ("data_parallel", "sequence_parallel")
    ranks = init_device_mesh(mesh.device_type, (mesh.size() // size, size), mesh_dim_names=names)
    group = ranks["sequence_parallel"].get_group()
    return ranks["data_parallel"], SequenceParallel(group, dist.get_rank(group), size)


def _repeated_heads(projection: Tensor, size: int) -> Tensor:
    """Every head ``[1, heads, n, D]`` as often, one behind the other, as makes their number a multiple of
    ``size``."""
    return projection.repeat_interleave(size // math.gcd(projection.shape[1], size), dim=1)


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is passed on as it is: every rank computes the same loss from the
    sum."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
