"""What is computed for every token."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_rc.correction.chunks import is_on_host
from verl_rc.correction.log_ratio import LogProbs
from verl_rc.correction.resolved import ResolvedCorrection


@dataclass(frozen=True)
class TokenOutputs:
    """Filled by ``sweep``."""

    weights: Tensor | None
    """``[B, T]``: weights after the threshold, before normalisation, 0 outside the response; None when nothing has one."""
    keep: Tensor
    """bool ``[B, T]``: False for tokens that a rule for tokens rejects."""

    @classmethod
    def like(cls, log_probs: LogProbs, resolved: ResolvedCorrection) -> "TokenOutputs":
        """Memory for the outputs of some rows."""
        keep = torch.empty(log_probs.train.shape, dtype=torch.bool, device=log_probs.train.device)
        return cls(None if resolved.threshold is None else _weights_like(log_probs), keep)


def _weights_like(log_probs: LogProbs) -> Tensor:
    shape, dtype = log_probs.train.shape, log_probs.dtype
    if is_on_host(log_probs.train):  # NumPy asks for huge pages: new ones are filled in a third of the time
        return torch.from_numpy(np.empty(shape, np.float32 if dtype == torch.float32 else np.float64))
    return torch.empty(shape, dtype=dtype, device=log_probs.train.device)
