"""Groups of rows that answer the same prompt."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def group_numbers(group_ids: Tensor | Sequence[Hashable], device: torch.device) -> Tensor:
    """int64 ``[B]``: a number in [0, B) for each row, the same for rows whose id is the same. No host sync for tensors."""
    if not isinstance(group_ids, Tensor):
        numbers: dict[Hashable, int] = {}
        return torch.tensor([numbers.setdefault(name, len(numbers)) for name in group_ids], dtype=torch.int64, device=device)
    # torch.unique would do, but its result has a size that only the device knows: the host would wait for it.
    ordered, order = group_ids.to(device).sort()
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(order).scatter(0, order, starts.cumsum(0) - 1)
