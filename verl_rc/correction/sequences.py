"""Log-probs and facts of the sequences of a batch, taken in chunks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.tensor_ops.masked import in_row_blocks


@dataclass(frozen=True)
class SequenceChunk:
    """Some sequences, cut to the longest response among them."""

    rows: Tensor
    """int64 ``[b]``."""
    width: int
    """Positions of the chunk; no response token of these sequences lies behind them."""

    def take(self, values: Tensor) -> Tensor:
        """These rows of ``[B]``, or of ``[B, T]`` these rows and positions."""
        return (values if values.ndim == 1 else values[:, : self.width]).index_select(0, self.rows)

    def write(self, values: Tensor, target: Tensor) -> None:
        """Put what was computed for these rows, or these positions of them, where it belongs in ``target``
        ``[B]`` or ``[B, T]``."""
        (target if values.ndim == 1 else target[:, : self.width]).index_copy_(0, self.rows, values)


def chunk_positions(device: torch.device) -> int:
    """How many positions a chunk has at most, unless a single row has more: temporaries take some 100 bytes
    of each."""
    # On a CPU temporaries should stay in its cache; a device would mostly wait for launches of small kernels.
    return 50_000 if device.type == "cpu" else 1 << 20


def sequence_chunks(response_mask: Tensor) -> list[SequenceChunk]:
    """All rows of a mask ``[B, T]``, each in one chunk; at least one chunk."""
    (num_rows, width), positions = response_mask.shape, chunk_positions(response_mask.device)
    # Most responses end long before the padding does: sequences of like length together are half the work.
    # Not on a device, nor for tensors without numbers (FakeTensorMode): the host would wait for the lengths.
    order, reach = torch.arange(num_rows, device=response_mask.device), [width] * num_rows
    if response_mask.numel() and type(response_mask) is Tensor and response_mask.device.type == "cpu":
        numbers = torch.arange(1, width + 1, dtype=torch.int32)
        lengths, order = in_row_blocks(
            lambda mask: mask.bool().int().mul_(numbers).amax(dim=-1), response_mask
        ).sort()
        reach = lengths.tolist()
    chunks, last = list[SequenceChunk](), num_rows
    while last > 0:
        longest = max(reach[last - 1], 1)
        first = max(last - max(positions // longest, 1), 0)
        chunks.append(SequenceChunk(order[first:last], longest))
        last = first
    return chunks or [SequenceChunk(order, width)]


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the sampled tokens under two policies, nats. ``ValueError`` unless all three have one
    shape ``[B, T]``."""

    train: Tensor
    rollout: Tensor
    response_mask: Tensor
    """True (or not 0) for tokens the policy produced."""

    def __post_init__(self) -> None:
        if not self.train.shape == self.rollout.shape == self.response_mask.shape or self.train.ndim != 2:
            raise ValueError(
                "train_log_probs, rollout_log_probs and response_mask must have one shape [B, T]; got "
                f"{list(self.train.shape)}, {list(self.rollout.shape)} and {list(self.response_mask.shape)}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Precision of log-ratios and weights: the more precise of the two, float32 at least."""
        # The gap is often as small as the last digit of a log-prob in bfloat16.
        return torch.promote_types(torch.promote_types(self.train.dtype, self.rollout.dtype), torch.float32)

    def take(self, chunk: SequenceChunk) -> "LogProbs":
        """Return the rows of one chunk."""
        return LogProbs(chunk.take(self.train), chunk.take(self.rollout), chunk.take(self.response_mask))


@dataclass(frozen=True)
class SequenceContext:
    """Facts about sequences besides their log-probs, for diagnostics and rules.

    Statistics are split by age where ages are known, and with full diagnostics by all other facts too.
    """

    group_slots: Tensor | None = None
    """int64 ``[B]``: sequences of one prompt share a number in [0, B)."""
    policy_versions: Tensor | None = None
    """int64 ``[B, T]``, or ``[B]`` where a sequence has one: version of the weights that sampled a token."""
    current_version: Tensor | int | None = None
    """The version ages count from; None: ages are unknown."""
    advantages: Tensor | None = None
    """``[B, T]``."""
    scores: Tensor | None = None
    """``[B]``: outcome scores; above 0 is correct."""
    entropies: Tensor | None = None
    """``[B, T]``, nats: entropy of the train policy's distribution at each token."""
    sum_pi_squared: Tensor | None = None
    """``[B, T]``: sum of the squares of its probabilities."""
    varentropies: Tensor | None = None
    """``[B, T]``, nats^2: variance of the log-prob of a token drawn from it."""
    engines: Tensor | None = None
    """int64 ``[B]``: number of the engine that sampled a sequence."""

    def take(self, chunk: SequenceChunk) -> "SequenceContext":
        """The facts of one chunk, but those that signatures look at, for all sequences at once."""
        names = ("group_slots", "policy_versions", "advantages", "scores")
        return replace(
            self, **{name: chunk.take(value) for name in names if (value := getattr(self, name)) is not None}
        )

    def ages(self, response_mask: Tensor) -> Tensor | None:
        """int64 ``[B, T]``: versions since the weights that sampled each token; 0 outside ``response_mask``;
        None if unknown."""
        if self.policy_versions is None or self.current_version is None:
            return None
        return torch.where(response_mask.bool(), self.current_version - _per_token(self.policy_versions), 0)

    def check(self, shape: torch.Size) -> None:
        """Raise ``ValueError`` unless every fact fits log-probs ``[B, T]``."""
        tokens, rows = list(shape), list(shape[:1])
        for name, value, fitting in (
            ("advantages", self.advantages, [tokens]),
            ("policy_versions", self.policy_versions, [tokens, rows]),
            ("scores", self.scores, [rows]),
            ("group_ids", self.group_slots, [rows]),
            ("entropies", self.entropies, [tokens]),
            ("sum_pi_squared", self.sum_pi_squared, [tokens]),
            ("varentropies", self.varentropies, [tokens]),
            ("engines", self.engines, [rows]),
        ):
            if value is not None and list(value.shape) not in fitting:
                expected = " or ".join(map(str, fitting))
                raise ValueError(
                    f"{name} must have shape {expected}, like the log-probs; got {list(value.shape)}"
                )


def newest_version(policy_versions: Tensor, response_mask: Tensor) -> Tensor:
    """The newest version among the response tokens, an int64 scalar still on its device; without any the
    lowest there can be."""
    lowest = torch.iinfo(torch.int64).min
    versions = torch.where(response_mask.bool(), _per_token(policy_versions), lowest)
    return versions.amax() if versions.numel() else torch.full((), lowest, device=versions.device)


def _per_token(versions: Tensor) -> Tensor:
    return versions if versions.ndim == 2 else versions[:, None]
