"""THE PAGE of rollout correction: ``measure`` the statistics of some sequences, ``apply`` weights and
rejection to them, or do both in one pass over their log-ratios."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import CorrectionSettings, RolloutCorrectionConfig, WeightSettings
from verl_rc.correction.decide import SequenceDecisions, TokenDecisions, decide
from verl_rc.correction.metrics import SMALLEST_NORMALISER
from verl_rc.correction.sequences import LogProbs, SequenceContext, newest_version
from verl_rc.correction.statistics import CorrectionStatistics, Measured, measure_sequences, measure_tokens
from verl_rc.tensor_ops.masked import group_numbers


@dataclass(frozen=True)
class CorrectionResult:
    """Rollout correction of one batch."""

    weights: Tensor | None
    """``[B, T]``, constants, 0 outside the response mask; None when ``rollout_is`` is null."""
    keep_mask: Tensor
    """bool ``[B, T]``: what takes part in the policy loss; True on padding of sequences that are not rejected
    as a whole."""
    rejected_rows: Tensor
    """bool ``[B]``: sequences with response tokens, all of them rejected."""
    statistics: CorrectionStatistics
    """What was measured, before rejection."""
    config: RolloutCorrectionConfig

    def metrics(self) -> dict[str, float]:
        """``rollout_corr/*`` by name; one copy from the device."""
        return self.statistics.metrics(self.config)


@torch.no_grad()
def compute_rollout_correction(  # noqa: PLR0913  (a public function: named arguments for notebooks and other trainers)
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    advantages: Tensor | None = None,
    group_ids: Tensor | Sequence[str] | Sequence[int] | None = None,
    policy_versions: Tensor | None = None,
    *,
    scores: Tensor | None = None,
    entropies: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    varentropies: Tensor | None = None,
    engines: Tensor | None = None,
    current_version: int | None = None,
) -> CorrectionResult:
    """Measure and apply rollout correction on a whole batch.

    The ratio is always train over rollout.

    Args:
        train_log_probs: ``[B, T]``, nats.
        rollout_log_probs: ``[B, T]``, nats.
        response_mask: ``[B, T]``.
        config: The model, or a mapping of its fields.
        advantages: ``[B, T]``; rules that look at their sign need them.
        group_ids: The prompt of each sequence; read with ``diagnostics=full``.
        policy_versions: int ``[B, T]`` or ``[B]``; with any diagnostics, to measure by token age.
        scores: ``[B]``, above 0 is correct; read with ``diagnostics=full``.
        entropies: ``[B, T]``, nats, of the train policy's distributions; read with ``diagnostics=full``.
        sum_pi_squared: ``[B, T]``, sums of their squared probabilities; read with ``diagnostics=full``.
        varentropies: ``[B, T]``, nats^2, variances of the log-prob of a token drawn from them; read with
            ``diagnostics=full``. Without them there is no ``surprisal_excess_bound``.
        engines: int ``[B]``, number of the engine that sampled each sequence; read with ``diagnostics=full``.
        current_version: Version from which ages count; None: the newest of ``policy_versions``.

    Raises:
        ValueError: Shapes differ, advantages are missing, or a log-prob is not finite under
            ``nonfinite_logprob=raise``.
    """
    config = _as_config(config)
    context = SequenceContext(
        group_slots=None if group_ids is None else group_numbers(group_ids, train_log_probs.device),
        policy_versions=policy_versions,
        current_version=current_version,
        advantages=advantages,
        scores=scores,
        entropies=entropies,
        sum_pi_squared=sum_pi_squared,
        varentropies=varentropies,
        engines=engines,
    )
    context.check(train_log_probs.shape)
    if policy_versions is not None and current_version is None:
        context = replace(context, current_version=newest_version(policy_versions, response_mask))
    result = measure_and_apply(train_log_probs, rollout_log_probs, response_mask, config, context)
    if config.nonfinite_logprob == "raise":
        require_finite(result.statistics.nonfinite_fraction, config)
    return result


@torch.no_grad()
def measure_and_apply(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    context: SequenceContext,
    batch: CorrectionStatistics | None = None,
) -> CorrectionResult:
    """``measure`` and ``apply`` in one pass; nothing is raised for log-probs that are not finite.

    ``batch``: statistics of the whole batch that the sequences belong to; None: those of these sequences do.
    """
    log_probs = LogProbs(train_log_probs, rollout_log_probs, response_mask)
    settings = config.settings()
    output = _Output(log_probs, settings)

    def apply_and_measure(tokens: TokenDecisions) -> Measured:
        output.write(tokens)
        return measure_tokens(tokens, settings)

    sequences, measured = decide(log_probs, settings, context, apply_and_measure)
    statistics = measure_sequences(measured, sequences, settings, context, log_probs)
    weights, keep_mask = output.finish(sequences, batch or statistics)
    return CorrectionResult(weights, keep_mask, sequences.rejected_rows, statistics, config)


@torch.no_grad()
def measure(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    context: SequenceContext | None = None,
) -> CorrectionStatistics:
    """Mergeable statistics of ``[B, T]`` log-probs (nats), before any rejection. Sequences without response
    tokens never count.

    ``train_log_probs`` are those of the proximal policy (decoupled) or of the current one (bypass). Raises
    ``ValueError`` when shapes differ or ``context`` lacks advantages that a rule needs.
    """
    log_probs = LogProbs(train_log_probs, rollout_log_probs, response_mask)
    settings, facts = _as_config(config).settings(), context or SequenceContext()
    sequences, measured = decide(log_probs, settings, facts, partial(measure_tokens, settings=settings))
    return measure_sequences(measured, sequences, settings, facts, log_probs)


@torch.no_grad()
def apply(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    statistics: CorrectionStatistics,
    advantages: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Weights (or None) and keep mask of some sequences, given the statistics of the whole batch they belong
    to.

    Batch normalisation divides by the batch's mean weight: over tokens, or sequences where each has one.
    ``advantages`` ``[B, T]`` are needed by rules that depend on their sign. Raises ``ValueError`` when shapes
    differ or advantages are missing.
    """
    log_probs = LogProbs(train_log_probs, rollout_log_probs, response_mask)
    settings, facts = _as_config(config).settings(), SequenceContext(advantages=advantages)
    output = _Output(log_probs, settings)
    sequences, _ = decide(log_probs, settings, facts, output.write)
    return output.finish(sequences, statistics)


def _as_config(config: RolloutCorrectionConfig | Mapping[str, object]) -> RolloutCorrectionConfig:
    # A model is not checked again: a caller may have changed one field of it on purpose.
    return (
        config
        if isinstance(config, RolloutCorrectionConfig)
        else RolloutCorrectionConfig.model_validate(config)
    )


class _Output:
    """Weights and keep mask ``[B, T]``, filled chunk by chunk."""

    def __init__(self, log_probs: LogProbs, settings: CorrectionSettings) -> None:
        shape, device = log_probs.train.shape, log_probs.train.device
        self.settings = settings.weights
        self.weights = (
            None if settings.weights is None else torch.zeros(shape, dtype=log_probs.dtype, device=device)
        )
        self.keep_mask = torch.ones(shape, dtype=torch.bool, device=device)

    def write(self, tokens: TokenDecisions) -> None:
        """Put the weights of a chunk, and which tokens are rejected by themselves, where they belong."""
        if tokens.weights is not None and self.weights is not None:
            tokens.chunk.write(tokens.weights.applied, self.weights)
        if tokens.rejection.causes:
            rejected = tokens.ratio.response - tokens.rejection.kept
            tokens.chunk.write(rejected.bool().logical_not_(), self.keep_mask)

    def finish(
        self, sequences: SequenceDecisions, batch: CorrectionStatistics
    ) -> tuple[Tensor | None, Tensor]:
        """Reject whole sequences, and normalise by what was measured of the whole ``batch``."""
        # Copied to all positions first: on a CPU an operation with a broadcast bool takes ten times as long.
        kept = sequences.rejection.kept.bool()[:, None].expand(self.keep_mask.shape).contiguous()
        self.keep_mask.logical_and_(kept)
        if self.weights is not None and self.settings is not None and self.settings.batch_normalize:
            self.weights.div_(_mean_weight(batch, self.settings))
        return self.weights, self.keep_mask


def _mean_weight(batch: CorrectionStatistics, settings: WeightSettings) -> Tensor:
    """What the batch's weights are divided by: ``rollout_is_batch_norm_factor``, but the number stays on its
    device."""
    level = "sequence" if settings.is_per_row else "token"
    mean = 1.0 + batch.totals().weights[f"applied_{level}"].excess.value
    return torch.where(mean > SMALLEST_NORMALISER, mean, 1.0)


class NonFiniteLogProbError(ValueError):
    """Too many tokens have log-probs that are not finite numbers."""


def require_finite(share: float, config: RolloutCorrectionConfig) -> None:
    """Raise ``NonFiniteLogProbError`` when a larger share of the response tokens than the configuration
    allows is not finite.

    Under ``nonfinite_logprob=raise`` none may be, else the share ``nonfinite_stop_fraction``.
    """
    section = "algorithm.rollout_correction"
    allowed = 0.0 if config.nonfinite_logprob == "raise" else config.nonfinite_stop_fraction
    if share > allowed:
        raise NonFiniteLogProbError(
            f"at most {allowed:.2%} of the response tokens may have a log-prob that is NaN or infinite, got "
            f"{share:.2%}. Corrupt logits are the usual cause: look at the weights and the precision of "
            f"engine and trainer. To go on all the same, raise {section}.nonfinite_stop_fraction (now "
            f"{config.nonfinite_stop_fraction}) under {section}.nonfinite_logprob=reject_sequence."
        )
