"""The columns of all rows from compiled loops, where log-probs lie in the CPU's memory."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_rc.correction.context import NUM_AGES, NUM_TURNS, RowContext
from verl_rc.correction.histogram import BINS_PER_SIDE, NUM_BINS
from verl_rc.correction.log_ratio import LogProbs
from verl_rc.correction.outputs import TokenOutputs
from verl_rc.correction.rejection import BoundedRule
from verl_rc.correction.resolved import ResolvedCorrection
from verl_rc.correction.rows import Columns
from verl_rc.correction.token_loops import (
    AT_AGES,
    AT_RULES,
    AT_TURNS,
    DIVERGENCES,
    EXTREMES,
    NAMES,
    RULE,
    RULE_LINES,
    WEIGHED,
    Batch,
    Plan,
    Rules,
    sweep_rows,
)

_POSITIONS_PER_THREAD = 1 << 20
"""Fewer are not worth a thread more: those of PyTorch, which wait for work in a busy loop, take their share of the cores."""
_POSITIONS_PER_SPAN = 1 << 17
"""What a thread takes at a time; rows are of different lengths."""


def one_pass(
    log_probs: LogProbs, resolved: ResolvedCorrection, context: RowContext, outputs: TokenOutputs | None, *, full: bool
) -> tuple[Columns, Tensor | None]:
    """Columns ``[B]`` of all rows and, with ``full`` diagnostics, the histogram of token log-ratios.

    Fills ``outputs``. For the configurations that ``sweep`` sends here. Arguments that are not contiguous, or of another type
    than the loops read, are copied.
    """
    batch, dtype = _batch(log_probs, context if full else RowContext(), outputs), log_probs.dtype
    rules = [bounded for bounded in resolved.rules if bounded.rule.is_per_token]
    plan, bounds = _plan(resolved, context, dtype, full), _bounds(rules, dtype)
    lines = np.zeros((AT_RULES + len(rules) * RULE_LINES, len(log_probs.train)))
    spans = iter(_spans(log_probs.train))
    threads = min(torch.get_num_threads(), 1 + log_probs.train.numel() // _POSITIONS_PER_THREAD)
    counts = np.zeros((threads, NUM_BINS), np.int64)

    def sweep_spans(of_thread: NDArray[np.int64]) -> None:
        for span in spans:
            sweep_rows(batch, plan, bounds, lines, of_thread, span)

    with ThreadPoolExecutor(threads) as pool:
        others = [pool.submit(sweep_spans, of_thread) for of_thread in counts[1:]]
        sweep_spans(counts[0])
    for other in others:
        other.result()
    columns = dict(_named(torch.from_numpy(lines), rules))
    if not full:
        return columns, None
    histogram = torch.from_numpy(counts.sum(axis=0)).double()
    histogram[BINS_PER_SIDE] -= histogram.sum() - columns["tokens"].sum()  # tokens that are not valid were counted as 0
    return columns, histogram


def _spans(values: Tensor) -> list[tuple[int, int]]:
    """First rows, and the rows behind the last ones: what a thread takes at a time."""
    rows, width = values.shape
    step = max(1, _POSITIONS_PER_SPAN // max(width, 1))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _batch(log_probs: LogProbs, context: RowContext, outputs: TokenOutputs | None) -> Batch:
    """Arrays that share the tensors' memory."""

    def array(tensor: Tensor | None, dtype: torch.dtype) -> NDArray[Any]:
        return torch.empty(0, 0, dtype=dtype).numpy() if tensor is None else tensor.detach().to(dtype).contiguous().numpy()

    dtype, versions = log_probs.dtype, None if context.current_version is None else context.policy_versions
    if versions is not None and versions.ndim == 1:
        versions = versions[:, None].expand_as(log_probs.response_mask)
    return Batch(
        train=array(log_probs.train, dtype),
        rollout=array(log_probs.rollout, dtype),
        mask=array(log_probs.response_mask.bool().view(torch.uint8), torch.uint8),
        weights=array(None, dtype) if outputs is None or outputs.weights is None else outputs.weights.numpy(),
        keep=array(None, torch.uint8) if outputs is None else outputs.keep.view(torch.uint8).numpy(),
        advantages=array(context.advantages, dtype),
        versions=array(versions, torch.int64),
    )


def _plan(resolved: ResolvedCorrection, context: RowContext, dtype: torch.dtype, full: bool) -> Plan:
    threshold, veto = resolved.threshold, resolved.config.rollout_token_veto_threshold
    lower, upper = (None, math.inf) if threshold is None else (threshold.lower, threshold.upper)
    by_row = {bounded.rule.divergence for bounded in resolved.rules if not bounded.rule.is_per_token}
    return Plan(
        weighs=WEIGHED.index(resolved.config.rollout_is),
        is_band=lower is not None,
        lowest=0.0 if lower is None else lower,
        highest=upper,
        log_low=-math.inf if threshold is None else _rounded(math.log(threshold.reciprocal_lower), dtype),
        log_high=_rounded(math.log(upper), dtype),
        log_veto=-math.inf if veto is None else _rounded(math.log(veto), dtype),
        sums_k2="k2" in by_row,
        sums_k3="k3" in by_row,
        full=full,
        current_version=0 if context.current_version is None else int(context.current_version),
        bits=np.empty(0, np.int32) if dtype == torch.float32 else np.empty(0, np.int64),
    )


def _bounds(rules: list[BoundedRule], dtype: torch.dtype) -> Rules:
    def bound(bounded: BoundedRule, value: float | None) -> float:
        """k3 is float64 whatever the log-probs are."""
        return -math.inf if value is None else value if bounded.rule.divergence == "k3" else _rounded(value, dtype)

    return Rules(
        kinds=np.array([DIVERGENCES.index(bounded.rule.divergence) for bounded in rules], np.int64),
        lower=np.array([bound(bounded, bounded.lower) for bounded in rules], np.float64),
        upper=np.array([bound(bounded, bounded.upper) for bounded in rules], np.float64),
        zero=np.array([bound(bounded, bounded.clamped_zero) for bounded in rules], np.float64),
    )


def _rounded(bound: float, dtype: torch.dtype) -> float:
    """As a tensor of this type would compare with it."""
    return float(np.float32(bound)) if dtype == torch.float32 else bound


def _named(lines: Tensor, rules: list[BoundedRule]) -> Iterator[tuple[str, Tensor]]:
    """Columns under the names that ``rows``, ``rejection`` and ``accounting`` give them."""
    columns = dict(zip(NAMES, lines, strict=False))
    yield from columns.items()
    yield "exact", columns["tokens"] - columns["not_exact"]
    yield "k1.sum", -columns["bounded"]
    yield "weight.log.max", columns["log_ratio.max"]
    yield "weight.negated_log.max", columns["negated_log_ratio.max"]
    yield "weight.raw_excess", columns["excess"]
    yield "weight.raw_excess_square", columns["excess_square"]
    for name, first, buckets in (("age", AT_AGES, NUM_AGES), ("turn", AT_TURNS, NUM_TURNS)):
        split = lines[first : first + 3 * buckets].view(3, buckets, -1)
        yield from zip((f"{name}_buckets.{part}" for part in ("tokens", "log_ratio", "k3")), split, strict=True)
    for number, bounded in enumerate(rules):
        first = AT_RULES + number * RULE_LINES
        parts = dict(zip((*RULE, *EXTREMES, "alone"), lines[first : first + RULE_LINES], strict=True))
        sides = ("above", "below") if bounded.lower is None else ("below", "above")  # k1 is high where the ratio is low
        parts["high"], parts["low"] = (parts.pop(side) for side in sides)
        yield from ((f"rule.{bounded.name}.{part}", column) for part, column in parts.items())
