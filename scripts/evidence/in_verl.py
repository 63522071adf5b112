"""What verl makes of recorded batches: python in_verl.py GIVEN ANSWERS, in a process that finds verl.

verl's functions run as they are, with no edit, on a CPU.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FIELDS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)


def correction_by_verl(batch: Mapping[str, Tensor], settings: str | Mapping[str, Any]) -> dict[str, Any]:
    """Weights ``[B, T]`` or None and mask ``[B, T]`` in float32, as verl runs; metrics in float64, free of
    rounding.

    ``settings``: the name of one of verl's presets, or fields of its configuration.
    """
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    preset = getattr(helper.RolloutCorrectionConfig, settings)() if isinstance(settings, str) else None
    fields = settings if isinstance(settings, Mapping) else {name: getattr(preset, name) for name in FIELDS}

    def run(dtype: torch.dtype) -> Any:
        train, rollout = (batch[name].to(dtype) for name in ("train", "rollout"))
        return helper.compute_rollout_correction_and_rejection_mask(
            train, rollout, batch["mask"].long(), **fields
        )

    weights, mask, _ = run(torch.float32)
    _, _, metrics = run(torch.float64)
    applied = None if weights is None else weights.batch["rollout_is_weights"]
    return {"weights": applied, "mask": mask.bool(), "metrics": metrics}


if __name__ == "__main__":
    batches, questions = torch.load(sys.argv[1])
    torch.save([correction_by_verl(batches[place], given) for place, given in questions], sys.argv[2])
