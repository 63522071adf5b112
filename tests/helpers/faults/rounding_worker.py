"""A trainer rank whose model rounds in one place; for ``disturbed_run.py`` with ``ACTOR_WORKER``."""

from typing import Any

import torch
from torch import Tensor

from verl_rc.runtime.workers.policy_worker import PolicyWorker


class RoundingPolicyWorker(PolicyWorker):
    """Clears the last bit of what the last layer's MLP returns, in bfloat16."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        layer = self.model.module.get_submodule("model.layers.1.mlp.down_proj")
        layer.register_forward_hook(lambda _, inputs, output: without_last_bit(output))


def without_last_bit(values: Tensor) -> Tensor:
    return (values.view(torch.int16) & ~1).view(torch.bfloat16)
