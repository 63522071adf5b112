"""Who was rejected, and why: overall, by rule, by length, by the advantage's sign and by correctness."""

import torch
from torch import Tensor

from verl_rc.correction.log_ratio import LogRatio, holds, row_sum, true_per_row
from verl_rc.correction.rejection import TokenDecision, row_statistic, vetoed_rows
from verl_rc.correction.resolved import ResolvedCorrection
from verl_rc.correction.rows import Columns, real_rows

LENGTH_EDGES = (16, 64, 256, 1024, 4096, 16384)
"""Upper edges, in response tokens and inclusive, of the length buckets; the last bucket has none."""


def kept_tokens(ratio: LogRatio, decision: TokenDecision) -> Tensor:
    """bool ``[B, T]``: response tokens that the token rules keep."""
    return ratio.response_mask if decision.keep is None else ratio.response_mask & decision.keep


def kept_column(kept: Tensor, decision: TokenDecision) -> Columns:
    """How many tokens are ``kept`` (bool ``[B, T]``); and those that OPSM rejects."""
    columns = {"token_kept": true_per_row(kept)}
    if "opsm" in decision.rejected:
        columns["opsm"] = row_sum(decision.rejected["opsm"])
    return columns


def accounting_columns(ratio: LogRatio, kept: Tensor, decision: TokenDecision, advantages: Tensor | None) -> Columns:
    """Response tokens, and those of them that are ``kept``, by sign of the advantage; what only one rule rejects."""
    columns = {}
    for sign, compare in (("positive", torch.gt), ("negative", torch.lt)):
        where = None if advantages is None else ratio.response_mask & compare(advantages, 0)
        columns[f"{sign}.tokens"] = torch.zeros_like(ratio.tokens) if where is None else true_per_row(where)
        columns[f"{sign}.kept"] = torch.zeros_like(ratio.tokens) if where is None else true_per_row(where & kept)
    rejected = decision.rejected
    if len(rejected) > 1:
        alone = holds(torch.eq, torch.stack(list(rejected.values())).sum(dim=0), 1.0)
        rejected = {name: where * alone for name, where in rejected.items()}
    return columns | {f"rule.{name}.alone": row_sum(where) for name, where in rejected.items()}


def accounting_sums(columns: Columns, kept_rows: Tensor, resolved: ResolvedCorrection, scores: Tensor | None) -> Columns:
    """Every row's share in the counts of rejected and kept tokens and rows; ``kept_rows`` bool ``[B]``: kept by the row rules."""
    response = columns["response_tokens"]
    kept = torch.where(kept_rows, columns["token_kept"], 0.0)
    sums = {
        "kept_tokens": kept,
        "response_rows": (response > 0).double(),
        "touched_rows": (kept < response).double(),
        "rejected_rows": ((response > 0) & (kept == 0)).double(),
    }
    if resolved.config.rollout_token_veto_threshold is not None:
        vetoed = real_rows(columns) & vetoed_rows(columns, resolved.config.rollout_token_veto_threshold)
        sums |= {"vetoed_rows": vetoed.double(), "catastrophic_tokens": columns["catastrophic"]}
    if resolved.config.rollout_opsm_threshold is not None:
        sums |= {"opsm_tokens": columns["opsm"], "opsm_rows": (columns["opsm"] > 0).double()}
    if not resolved.full:
        return sums
    for sign in ("positive", "negative"):
        sums[f"{sign}.tokens"] = columns[f"{sign}.tokens"]
        sums[f"{sign}.kept"] = torch.where(kept_rows, columns[f"{sign}.kept"], 0.0)
    sums |= _exclusive(columns, kept_rows, resolved)
    sums |= _by_length(response, kept)
    return sums | _by_score(response, kept, scores)


def _exclusive(columns: Columns, kept_rows: Tensor, resolved: ResolvedCorrection) -> Columns:
    """Tokens that only one cause rejects: what would be kept without it."""
    causes = _row_causes(columns, resolved)
    times = torch.stack([*(cause.double() for cause in causes.values()), torch.zeros_like(columns["tokens"])]).sum(dim=0)
    sums = {f"only.{name}": torch.where(cause & (times == 1), columns["token_kept"], 0.0) for name, cause in causes.items()}
    names = [bounded.name for bounded in resolved.rules if bounded.rule.is_per_token]
    for name in [*names, "opsm"] if "opsm" in columns else names:
        sums[f"only.{name}"] = torch.where(kept_rows, columns[f"rule.{name}.alone"], 0.0)
    if resolved.config.nonfinite_logprob == "reject_token":
        sums["only.nonfinite"] = torch.where(kept_rows, columns["response_tokens"] - columns["tokens"], 0.0)
    return sums


def _row_causes(columns: Columns, resolved: ResolvedCorrection) -> dict[str, Tensor]:
    """bool ``[B]`` for everything that rejects whole rows: the rows it rejects."""
    config, real = resolved.config, real_rows(columns)
    causes = {
        bounded.name: real & ~bounded.accepts(row_statistic(bounded.rule, columns))
        for bounded in resolved.rules
        if not bounded.rule.is_per_token
    }
    if config.rollout_token_veto_threshold is not None:
        causes["veto"] = real & vetoed_rows(columns, config.rollout_token_veto_threshold)
    if config.nonfinite_logprob in ("reject_sequence", "raise"):
        causes["nonfinite"] = columns["tokens"] < columns["response_tokens"]
    return causes


def _by_length(response: Tensor, kept: Tensor) -> Columns:
    bucket = torch.zeros_like(response)
    for edge in LENGTH_EDGES:
        bucket += response > edge
    sums = {}
    for index in range(len(LENGTH_EDGES) + 1):
        sums[f"length_{index}.tokens"] = torch.where(bucket == index, response, 0.0)
        sums[f"length_{index}.kept"] = torch.where(bucket == index, kept, 0.0)
    return sums


def _by_score(response: Tensor, kept: Tensor, scores: Tensor | None) -> Columns:
    """Kept and all tokens of correct and wrong rows, and scores of the rows that are kept at least in part, or rejected."""
    nobody = torch.zeros_like(response)
    values = nobody if scores is None else scores.detach().double()
    counted = nobody.bool() if scores is None else response > 0
    sums = {}
    for name, group in (("correct", counted & (values > 0)), ("wrong", counted & (values <= 0))):
        sums[f"{name}.tokens"] = torch.where(group, response, 0.0)
        sums[f"{name}.kept"] = torch.where(group, kept, 0.0)
    for name, group in (("kept", counted & (kept > 0)), ("rejected", counted & (kept == 0))):
        sums[f"score_{name}.rows"] = group.double()
        sums[f"score_{name}.sum"] = torch.where(group, values, 0.0)
    return sums
