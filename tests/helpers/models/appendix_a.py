"""Three short rows whose every correction quantity was worked out by hand, and random ragged cases."""

import torch
from torch import Tensor

NAN = float("nan")


def rows(masked: float = NAN) -> tuple[Tensor, Tensor, Tensor]:
    """Train and rollout log-probs and mask, float64 ``[3, 4]``; ``masked`` stands where the mask is False."""
    x = masked
    train = [[-1.0, -0.5, -2.0, -0.1], [-3.0, -1.0, -0.2, x], [-0.7, -0.9, x, -0.7]]
    rollout = [[-1.1, -0.4, -2.3, -0.1], [-1.0, -1.2, -0.2, x], [-0.7, -0.6, x, -0.9]]
    mask = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 1]]
    return (
        torch.tensor(train, dtype=torch.float64),
        torch.tensor(rollout, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.bool),
    )


def random_case(num_rows: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random float64 log-probs with ragged masks, some rows empty."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(num_rows, width, generator=generator, dtype=torch.float64)
    train = rollout + 0.5 * torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, width + 1, (num_rows,), generator=generator)
    return train, rollout, torch.arange(width) < lengths[:, None]
