"""What a step of exact mode demands of log-probs."""

from torch import Tensor

from verl_rc.exact import InexactError


def require_equal(train: Tensor, rollout: Tensor, mask: Tensor, where: str, certificate: str) -> None:
    """Raise ``InexactError`` unless the log-probs are equal, bit for bit, where ``mask`` is True.

    All ``[B, R]``. ``certificate``: the command that names the first operation that differs.
    """
    different = mask & (train != rollout)  # NaN is not equal to NaN: it counts
    if count := int(different.sum()):
        distances = (train - rollout).abs()[different]
        numbers = distances[distances.isfinite()]
        largest = f"by {float(numbers.max()):.3g} nats at most" if len(numbers) else "none by a number"
        nonfinite = len(distances) - len(numbers)
        raise InexactError(
            f"{where}: in exact mode the trainer's log-probs must be those of the engine, but {count:,} of "
            f"{int(mask.sum()):,} tokens differ, {largest}, {nonfinite:,} of them not finite. This names the "
            f"first operation that differs: {certificate}"
        )
