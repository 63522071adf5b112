"""The real entry point with a fault planted: ``python -m scripts.planted_faults.start FAULT -- key=value
…``."""

import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl_rc import main_ppo
from verl_rc.cluster.model_groups import ActorGroup
from verl_rc.rollout.vllm.options import VllmOptions


def shift_mask() -> None:
    """The loss looks one token to the right of what was sampled."""
    import torch

    from verl_rc.driver import train

    build = train.build_train_batch

    def build_and_shift(*arguments: object) -> object:
        step = build(*arguments)
        batch = step.batch.clone()
        batch.loss_mask = torch.nn.functional.pad(batch.loss_mask[:, :-1], (1, 0), value=False)
        return replace(step, batch=batch)

    train.build_train_batch = build_and_shift


if __name__ == "__main__":
    fault, overrides = sys.argv[1], sys.argv[sys.argv.index("--") + 1 :]
    os.environ["PLANTED_FAULT"] = fault
    os.environ["PYTHONPATH"] = os.pathsep.join(
        (str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", ""))
    )
    VllmOptions.worker = "planted_faults.held_out_fourth_workers:FourthEngine"
    ActorGroup.worker = "planted_faults.held_out_fourth_workers:FourthPolicyWorker"
    if fault == "shifted_mask":
        shift_mask()
    sys.argv = [main_ppo.__file__, *overrides]
    main_ppo.main()
