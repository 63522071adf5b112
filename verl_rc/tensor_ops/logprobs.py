"""Log-probs of given tokens and entropies of whole distributions, from logits."""

from torch import Tensor


def log_probs_from_logits(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """``log softmax(logits / temperature)[token_ids]``.

    ``logits`` is ``[N, V]``, ``token_ids`` int64 ``[N]``; returns float32 ``[N]``, nats. Computed in float32
    whatever the logits'
    dtype, as logit of the token minus logsumexp, so that no ``[N, V]`` table of log-probs is kept for the backward
    pass. """
    _check(logits, temperature)
    scaled = logits.float() / temperature
    return scaled.gather(-1, token_ids[:, None])[:, 0] - scaled.logsumexp(dim=-1)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """``H = logsumexp(z) - sum(softmax(z) z)`` with ``z = logits / temperature``; ``[N, V]`` to float32 ``[N]``,
    nats."""
    _check(logits, temperature)
    scaled = logits.float() / temperature
    return scaled.logsumexp(dim=-1) - (scaled.softmax(dim=-1) * scaled).sum(dim=-1)


def _check(logits: Tensor, temperature: float) -> None:
    if logits.ndim != 2 or not temperature > 0:
        raise ValueError(f"logits must be [N, V] and the temperature > 0, got {list(logits.shape)} and {temperature}.")
