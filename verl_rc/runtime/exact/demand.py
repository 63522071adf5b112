"""The check of exact mode: the trainer's log-probs are those of the engine."""

import shlex

from torch import Tensor

from verl_rc.config.run import ActorRolloutRefConfig
from verl_rc.records.batches import RolloutBatch
from verl_rc.records.ragged import Ragged
from verl_rc.runtime.exact import InexactError


def require_exact(
    policy: ActorRolloutRefConfig, train: Tensor, rollouts: Ragged[RolloutBatch], version: int, step: str
) -> None:
    """In exact mode, raise ``InexactError`` unless log-probs ``[N]`` that the trainer computed with the
    weights of ``version`` are those of the engine, bit for bit, for every token that was sampled with these.

    ``step`` is its name in the message.
    """
    if not policy.exact:
        return
    rollout, mask = rollouts.rollout_log_probs, rollouts.response_mask & (rollouts.policy_versions == version)
    different = mask & (train != rollout)  # NaN is not equal to NaN: it counts
    if count := int(different.sum()):
        distances = (train - rollout).abs()[different]
        finite = distances[distances.isfinite()]
        largest = f"by {float(finite.max()):.3g} nats at most" if len(finite) else "none by a number"
        nonfinite = len(distances) - len(finite)
        raise InexactError(
            f"{step}: in exact mode the trainer's log-probs must be those of the engine, but {count:,} of "
            f"{int(mask.sum()):,} tokens differ, {largest}, {nonfinite:,} of them not finite. Find the first "
            f"operation that differs with: verl-rc exact {shlex.quote(policy.model.path)} --dtype "
            f"{policy.rollout.dtype}"
        )
