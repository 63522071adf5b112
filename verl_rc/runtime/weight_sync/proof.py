"""Proof that the engines hold the trainer's weights: receipts of updates, log-prob gaps of sampled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from verl_rc.config.errors import listed
from verl_rc.config.models import ActorConfig, torch_name
from verl_rc.config.rollout import RolloutConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionStatistics, measure
from verl_rc.metrics.bounds import BOUNDS, least_precise
from verl_rc.records.batches import RolloutBatch
from verl_rc.records.ragged import Ragged
from verl_rc.runtime.weight_sync.manifest import Manifest
from verl_rc.runtime.weight_sync.sender import SendReceipt


class SyncProofError(RuntimeError):
    """The engines do not hold the trainer's weights."""


@dataclass(frozen=True)
class LoadReceipt:
    """The tensors that one engine worker received and loaded."""

    digests: dict[str, int]
    """Digest of every received tensor, by name."""
    not_loaded: list[str]
    """Parameters of the worker's model that no tensor filled."""
    unread: list[str] = field(default_factory=list)
    """Received tensors that the worker's model does not use."""


def check_receipts(
    manifest: Manifest,
    send_receipt: SendReceipt,
    load_receipts: Sequence[Sequence[LoadReceipt]],
    version: int,
) -> None:
    """Check that every worker of every engine received each tensor of the manifest, byte for byte, and filled
    all its parameters.

    ``load_receipts``: for each engine, one receipt per worker. Raises ``SyncProofError`` with names and
    counts.
    """
    names = set(manifest.names)
    if set(send_receipt.digests) != names:
        raise SyncProofError(
            f"weight version {version}: all {len(names)} tensors must be sent, missing "
            f"{listed(names - set(send_receipt.digests))}."
        )
    for engine, workers in enumerate(load_receipts):
        for worker, receipt in enumerate(workers):
            source = f"weight version {version}, rollout engine {engine}, worker {worker}"
            if set(receipt.digests) != names:
                raise SyncProofError(
                    f"{source}: must receive all {len(names)} tensors, received {len(receipt.digests)}, "
                    f"missing {listed(names - set(receipt.digests))}."
                )
            mismatched = {name for name in names if receipt.digests[name] != send_receipt.digests[name]}
            if mismatched:
                raise SyncProofError(
                    f"{source}: bytes received must equal bytes sent; they differ for {listed(mismatched)}."
                )
            if receipt.not_loaded:
                raise SyncProofError(
                    f"{source}: every parameter of the engine's model must be filled; untouched: "
                    f"{listed(receipt.not_loaded)}."
                )
            if receipt.unread:
                raise SyncProofError(
                    f"{source}: the engine's model must use every tensor of the trainer's, but ignores "
                    f"{listed(receipt.unread)}: they compute different numbers. Train another model."
                )


@dataclass(frozen=True)
class LogProbGap:
    """Mean and extreme of ``|trainer log-prob - rollout log-prob|`` over sampled tokens, nats."""

    mean: float
    maximum: float
    num_nonfinite: int = 0
    """Number of further tokens with a log-prob that is NaN or infinite."""

    @classmethod
    def between(cls, train_log_probs: Tensor, rollouts: Ragged[RolloutBatch]) -> "LogProbGap | None":
        """Gap of ``train_log_probs`` ``[N]`` over the sampled tokens. See ``from_statistics``."""
        config = RolloutCorrectionConfig(diagnostics="core")
        train, rollout, mask = (
            one[None] for one in (train_log_probs, rollouts.rollout_log_probs, rollouts.response_mask)
        )
        return cls.from_statistics(measure(train, rollout, mask, config))

    @classmethod
    def from_statistics(cls, statistics: CorrectionStatistics | None) -> "LogProbGap | None":
        """Gap from the statistics of rollout correction; None without any, and when no token has two finite
        log-probs: then they say nothing about weights."""
        if statistics is None:
            return None
        totals = statistics.numbers().totals
        distance = totals.unreported["distance"]
        if not distance.count:
            return None
        nonfinite = totals.means["nonfinite_token_fraction"].total
        return cls(distance.value, totals.extremes["distance"].farthest, int(nonfinite))

    def require_at_most(self, limit: float, source: str) -> None:
        """Raise ``SyncProofError`` when the mean gap is above ``limit`` nats, or NaN; ``source`` names its
        tokens."""
        # Not `self.mean > limit`, which is False for NaN.
        if not self.mean <= limit:
            raise SyncProofError(
                f"{source}: the mean |trainer - rollout log-prob| must be at most {limit:.3g} nats for this "
                f"engine, it is {self.mean:.3g} (largest {self.maximum:.3g}). The engine does not sample "
                "from the trainer's weights: look for a missed weight update, a stale prefix cache or "
                "another temperature. If the gap is expected, set "
                "actor_rollout_ref.rollout.sync_proof.gap_limit."
            )


# Largest plausible mean gaps, nats, by the least precise part of engine and trainer: well above the gaps of
# rounding in small models (0.016 with fp8 weights, 0.05 with an fp8 cache, docs/experiment_log.md), below
# that of a missed update in fp32. A first gap up to this one calibrates the limit of the run.
_PLAUSIBLE_MEAN_GAP = {
    "float32": 1e-4,
    "float16": 7e-3,
    "bfloat16": 0.06,
    "fp8_weights": 0.3,
    "fp8_kv_cache": 0.9,
}
_FAULT_FACTOR = 10.0


@dataclass(frozen=True)
class GapLimit:
    """Limit of the mean gap: configured, or calibrated by the first plausible gap of the run."""

    plausible: float
    """Nats; the limit until it is calibrated. See ``least_precise``."""
    fixed: float | None = None
    """``sync_proof.gap_limit``, nats. None means that the limit is calibrated."""
    fault_factor: float = 1.0
    """A gap above this multiple of a calibrated limit is a fault; a gap between the two is an alert."""
    is_estimated: bool = False
    """Whether rounding in this precision can be estimated for the model, see ``within``."""

    @classmethod
    def for_precision(cls, precision: str, fixed: float | None = None) -> "GapLimit":
        """``precision``: a key of the table of plausible gaps."""
        # In float32 only a fault widens the gap. In other precisions training widens it, too, and samples of
        # few tokens scatter.
        factor = 1.0 if precision == "float32" else _FAULT_FACTOR
        return cls(_PLAUSIBLE_MEAN_GAP[precision], fixed, factor, precision in ("float16", "bfloat16"))

    @classmethod
    def from_config(cls, rollout: RolloutConfig, actor: ActorConfig) -> "GapLimit":
        """The limit of a run's engine and trainer."""
        trainer_dtype = torch_name(actor.fsdp_config.dtype)
        precision = least_precise(rollout.dtype, rollout.quantization, rollout.kv_cache_dtype, trainer_dtype)
        return cls.for_precision(precision, rollout.sync_proof.gap_limit)

    def within(self, rounding: float) -> "GapLimit":
        """The limit for a model whose log-probs rounding moves by a mean of ``rounding`` nats: a larger gap
        is not called plausible, whatever other models have."""
        return replace(self, plausible=min(self.plausible, BOUNDS.far_above_floor * rounding))

    def limit(self, calibrated: float | None) -> float:
        """The largest usual mean gap, nats; ``calibrated`` is None before the first plausible gap."""
        return self.fixed or calibrated or self.plausible

    def fault(self, calibrated: float | None) -> float:
        """The largest mean gap, nats, that an engine with the trainer's weights can have."""
        return self.limit(calibrated) * (self.fault_factor if self.fixed is None else 1.0)

    def calibrate(self, gap: LogProbGap, calibrated: float | None, source: str) -> float | None:
        """The calibrated limit after ``gap``, for checkpoints. Only the first plausible gap sets it: a fault
        from the start stays an alert for as long as it lasts.

        Raises ``SyncProofError`` when ``gap`` is a fault; ``source`` names the source of the gap.
        """
        gap.require_at_most(self.fault(calibrated), source)
        if calibrated is not None or gap.mean > self.limit(None):
            return calibrated
        # At least a quarter of the plausible gap: the first gap may be small by chance.
        usual = max(BOUNDS.far_above_floor * gap.mean, self.plausible / 4)
        return min(self.plausible, usual) if self.fault_factor == 1.0 else usual
