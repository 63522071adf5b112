"""All tokens are looked at once: what every row adds up to, and the weights and verdicts of its tokens."""

from torch import Tensor

from verl_rc.correction.accounting import accounting_columns, kept_column, kept_tokens
from verl_rc.correction.chunks import RowChunk, RowChunks
from verl_rc.correction.context import NUM_AGES, NUM_TURNS, RowContext
from verl_rc.correction.histogram import log_ratio_histogram
from verl_rc.correction.importance import weighted_tokens
from verl_rc.correction.log_ratio import LogProbs, LogRatio
from verl_rc.correction.outputs import TokenOutputs
from verl_rc.correction.rejection import TokenDecision, decide_tokens
from verl_rc.correction.resolved import ResolvedCorrection
from verl_rc.correction.rows import (
    Columns,
    TokenWeights,
    age_columns,
    deciding_columns,
    describing_columns,
    join,
    token_rule_columns,
    turn_columns,
    weight_columns,
)
from verl_rc.correction.weight_statistics import row_level_weights


def sweep(
    log_probs: LogProbs,
    resolved: ResolvedCorrection,
    context: RowContext,
    outputs: TokenOutputs | None = None,
    *,
    describe: bool = True,
) -> tuple[Columns, Tensor | None]:
    """Columns ``[B]`` of all rows and, with full diagnostics, the histogram of token log-ratios; fills ``outputs``.

    Without ``describe`` only what decides over rows is sure to be there.
    """
    if outputs is not None:
        outputs.keep.fill_(True)
        if outputs.weights is not None:
            outputs.weights.zero_()
    parts: list[Columns] = []
    histogram: Tensor | None = None
    chunks = RowChunks.of(log_probs.response_mask)
    for chunk in chunks:
        ratio, facts = log_probs.ratio(chunk), context.of(chunk)
        decision = decide_tokens(ratio, resolved.rules, resolved.config, facts.advantages)
        kept = kept_tokens(ratio, decision)
        weights = TokenWeights.of(ratio, resolved) if resolved.has_token_weights else None
        columns = deciding_columns(ratio, resolved.rules, resolved.config) | kept_column(kept, decision)
        if describe:
            columns |= _description(ratio, decision, weights, resolved)
        if describe and resolved.full:
            columns |= _splits(ratio, kept, decision, facts)
            counts = log_ratio_histogram(ratio.values, ratio.ones)
            histogram = counts if histogram is None else histogram + counts
        parts.append(columns)
        if outputs is not None:
            _write(outputs, chunk, decision, _written(ratio, weights, columns, resolved))
        del ratio, weights, decision, kept  # else two chunks' temporaries live side by side
    return join(parts, chunks), histogram


def _written(ratio: LogRatio, weights: TokenWeights | None, columns: Columns, resolved: ResolvedCorrection) -> Tensor | None:
    """Weights ``[b, t]`` of some rows, each token's own or its row's."""
    if weights is not None:
        return weights.written
    if not resolved.has_row_weights:
        return None
    weights_of_rows = row_level_weights({name: columns[name].double() for name in ("log_ratio", "tokens")}, resolved)[1]
    return weighted_tokens(ratio, resolved.config) * weights_of_rows[:, None].to(ratio.values.dtype)


def _write(outputs: TokenOutputs, chunk: RowChunk, decision: TokenDecision, weights: Tensor | None) -> None:
    if decision.keep is not None:
        chunk.write(decision.keep, outputs.keep)
    if weights is not None and outputs.weights is not None:
        chunk.write(weights.to(outputs.weights.dtype), outputs.weights)


def _description(ratio: LogRatio, decision: TokenDecision, weights: TokenWeights | None, resolved: ResolvedCorrection) -> Columns:
    """The gap between the policies, what token rules look at, and weights that every token has by itself."""
    columns = describing_columns(ratio, resolved.full)
    for bounded in resolved.rules:
        if bounded.rule.is_per_token:
            columns |= token_rule_columns(ratio, bounded)
    if weights is not None:
        assert resolved.threshold is not None
        columns |= weight_columns(ratio, weights, resolved.threshold, resolved.full)
    return columns


def _splits(ratio: LogRatio, kept: Tensor, decision: TokenDecision, context: RowContext) -> Columns:
    """By sign of the advantage, single rule, age and turn."""
    columns = accounting_columns(ratio, kept, decision, context.advantages)
    columns |= age_columns(ratio, context.ages(ratio.response_mask), NUM_AGES)
    return columns | turn_columns(ratio, NUM_TURNS)
