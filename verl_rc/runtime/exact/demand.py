"""The check of exact mode: the trainer's log-probs are those of the engine."""

from torch import Tensor

from verl_rc.runtime.exact import InexactError


def require_equal(train: Tensor, rollout: Tensor, mask: Tensor, step: str, command: str) -> None:
    """Raise ``InexactError`` unless the log-probs are equal, bit for bit, where ``mask`` is True.

    All ``[B, R]``. ``step``: its name, ``command``: the one that names the first operation that differs; both
    for the message.
    """
    different = mask & (train != rollout)  # NaN is not equal to NaN: it counts
    if count := int(different.sum()):
        distances = (train - rollout).abs()[different]
        finite = distances[distances.isfinite()]
        largest = f"by {float(finite.max()):.3g} nats at most" if len(finite) else "none by a number"
        nonfinite = len(distances) - len(finite)
        raise InexactError(
            f"{step}: in exact mode the trainer's log-probs must be those of the engine, but {count:,} of "
            f"{int(mask.sum()):,} tokens differ, {largest}, {nonfinite:,} of them not finite. Find the first "
            f"operation that differs with: {command}"
        )
