"""Rollout correction of a batch: the formulas of ``correct``, applied and measured slice by slice."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import itemgetter
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.context import SequenceContext, newest_version
from verl_rc.correction.correct import importance_weights, reject
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.correction.statistics import CorrectionStatistics, measure_rows, row_weights
from verl_rc.tensor_ops.masked import group_numbers, row_slices

if TYPE_CHECKING:  # formulas are used beside other trainers, without what records need
    from verl_rc.records.batches import RolloutBatch
    from verl_rc.records.ragged import Ragged

_SLICE_ELEMENTS = 1 << 18
"""Most positions of ``[B, T]`` that are computed on at once: temporaries take some 200 bytes of each, and
should stay in a CPU's cache."""


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
    """The statistics, measured before rejection."""
    config: RolloutCorrectionConfig
    row_weights: Tensor | None = None
    """float64 ``[b, 3]``, of a part of the batch, if those of prompts are asked for: the mean weight of each
    sequence, applied and raw, and 1 where it has a valid token."""

    def metrics(self) -> dict[str, float]:
        """``rollout_corr/*`` by name; one copy from the device."""
        return self.statistics.metrics(self.config)

    def learning_rate_factor(self) -> float:
        """The factor of the step's learning rate in [0, 1], by ``scale_lr_by_ess``; 1 without it."""
        if self.config.scale_lr_by_ess is None:
            return 1.0
        share = self.metrics()["rollout_corr/rollout_is_eff_sample_size"]
        return math.sqrt(share) if self.config.scale_lr_by_ess == "sqrt" else share


@torch.no_grad()
def correct_sequences(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    context: SequenceContext,
    batch: CorrectionStatistics | None = None,
) -> CorrectionResult:
    """Correct some sequences of a batch; nothing is raised for log-probs that are not finite.

    ``batch``: statistics of the whole batch, by whose mean weight batch normalisation divides; None: those of
    these sequences. Raises ``ValueError`` when shapes differ or ``context`` lacks advantages that a rule
    needs.
    """
    context.check(train_log_probs, rollout_log_probs, response_mask)
    parts = [
        _correct(
            LogRatio.from_log_probs(train_log_probs[rows], rollout_log_probs[rows], response_mask[rows]),
            config,
            context.map(of_rows=itemgetter(rows), of_tokens=itemgetter(rows)),
        )
        for rows in row_slices(len(response_mask), response_mask.shape[1], _SLICE_ELEMENTS)
    ]
    return _joined(parts, context.group_slots, batch)


@torch.no_grad()
def correct_rows(
    rollouts: "Ragged[RolloutBatch]",
    config: RolloutCorrectionConfig,
    train_log_probs: Tensor,
    context: SequenceContext,
) -> CorrectionResult:
    """``compute_rollout_correction`` on rows without padding: columns ``[N]`` stand here, in ``context`` and
    in the result for ``[B, T]``. Rows of similar length are corrected together."""
    mask, blocks = rollouts.comparable_mask, rollouts.blocks(_SLICE_ELEMENTS)
    parts = []
    for rows in blocks:

        def pad(column: Tensor, rows: list[int] = rows) -> Tensor:
            return cast(Tensor, rollouts.pad(column, rows))

        ratio = LogRatio.from_log_probs(pad(train_log_probs), pad(rollouts.rollout_log_probs), pad(mask))
        parts.append(_correct(ratio, config, context.map(of_rows=itemgetter(rows), of_tokens=pad)))
    order = torch.tensor([row for rows in blocks for row in rows]).argsort()
    result = _joined(
        parts,
        context.group_slots,
        of_tokens=partial(rollouts.flattened, blocks),
        of_rows=lambda rows: torch.cat(rows)[order],
    )
    if config.nonfinite_logprob == "raise":
        require_finite(result.statistics.nonfinite_fraction, config)
    return result


def _correct(ratio: LogRatio, config: RolloutCorrectionConfig, facts: SequenceContext) -> CorrectionResult:
    """Correct a part of the batch, without normalisation."""
    settings, weights, means = config.settings(), None, None
    weighting = None if settings.weights is None else importance_weights(ratio, settings.weights)
    rejection = reject(ratio, settings, facts.advantages)
    if weighting is not None:
        weighted = ratio.response if settings.nonfinite == "neutral" else ratio.valid
        weights = (weighting.applied * weighted).to(ratio.values.dtype)
        if settings.full and facts.group_slots is not None:
            means = torch.stack([*row_weights(ratio, weighting).values(), (ratio.lengths > 0).double()], -1)
    statistics = measure_rows(ratio, weighting, rejection, facts, settings)
    rejected = ratio.has_response & ~rejection.has_kept
    return CorrectionResult(weights, rejection.keep_mask, rejected, statistics, config, means)


def _joined(
    parts: Sequence[CorrectionResult],
    group_slots: Tensor | None,
    batch: CorrectionStatistics | None = None,
    of_tokens: Callable[[list[Tensor]], Tensor] = torch.cat,
    of_rows: Callable[[list[Tensor]], Tensor] = torch.cat,
) -> CorrectionResult:
    """The result for all sequences; ``of_tokens`` and ``of_rows`` join the tensors of ``parts``."""
    config, settings = parts[0].config, parts[0].config.settings()
    measured = reduce(CorrectionStatistics.merge, (part.statistics for part in parts))
    means = [part.row_weights for part in parts if part.row_weights is not None]
    if means and group_slots is not None:
        applied, raw, has_weight = of_rows(means).unbind(dim=-1)
        measured = measured.with_prompts({"applied": applied, "raw": raw}, has_weight > 0, group_slots)
    weights = [part.weights for part in parts if part.weights is not None]
    normalised = of_tokens(weights) if weights else None
    if normalised is not None and settings.weights is not None and settings.weights.batch_normalize:
        normalised = normalised / (batch or measured).mean_weight(settings.weights)
    return CorrectionResult(
        normalised,
        of_tokens([part.keep_mask for part in parts]),
        of_rows([part.rejected_rows for part in parts]),
        measured,
        config,
    )


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
    context.check(train_log_probs, rollout_log_probs, response_mask)
    if policy_versions is not None and current_version is None:
        context = replace(context, current_version=newest_version(policy_versions, response_mask))
    result = correct_sequences(train_log_probs, rollout_log_probs, response_mask, config, context)
    if config.nonfinite_logprob == "raise":
        require_finite(result.statistics.nonfinite_fraction, config)
    return result


def measure(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    context: SequenceContext | None = None,
) -> CorrectionStatistics:
    """The statistics of ``correct_sequences`` alone: mergeable, before any rejection. Sequences without
    response tokens never count.

    ``train_log_probs`` ``[B, T]``, nats, are those of the proximal policy (decoupled) or of the current one
    (bypass).
    """
    facts = context or SequenceContext()
    result = correct_sequences(train_log_probs, rollout_log_probs, response_mask, _as_config(config), facts)
    return result.statistics


def _as_config(config: RolloutCorrectionConfig | Mapping[str, object]) -> RolloutCorrectionConfig:
    # A model is not checked again: a caller may have changed one field of it on purpose.
    return (
        config
        if isinstance(config, RolloutCorrectionConfig)
        else RolloutCorrectionConfig.model_validate(config)
    )


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
