"""What a correction does to a recorded batch: numbers that are quotients of sums over prompts, with
bootstrapped intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction
from verl_rc.insight.what_if.batch import RecordedBatch
from verl_rc.losses import compute_policy_loss

DRAWS = 1_000
SEED = 0
_MOST_PROMPTS = 1_500
"""More prompts are joined to so many blocks: the bias is computed from every pair of them."""
_UNCAPPED = 4.9e8
"""A bound above every weight: log-weights are clamped to 20."""
_BAND = (0.05, 0.95)

Updates = Callable[[RecordedBatch, Sequence[Tensor], Tensor, int], Sequence[Tensor]]
"""Computes the update of each block of prompts, float64 ``[blocks, D]``, for each of several coefficients.

Its arguments: a batch; coefficients ``[B, T]``, which multiply the tokens' gradients; the block of each row
``[B]``; the number of blocks.
"""


@dataclass(frozen=True)
class Interval:
    """A number and where 90 % of the bootstrap draws of prompts lie."""

    value: float
    low: float
    high: float

    @classmethod
    def from_draws(cls, values: Tensor) -> "Interval":
        """``values`` ``[1 + draws]``: of all prompts first, then of the draws; draws that are not finite do
        not count."""
        draws = values[1:][values[1:].isfinite()]
        if not len(draws):
            return cls(float(values[0]), float("nan"), float("nan"))
        low, high = torch.quantile(draws, torch.tensor(_BAND, dtype=draws.dtype)).tolist()
        return cls(float(values[0]), low, high)


@dataclass(frozen=True)
class Estimate:
    """One correction on the recorded rows."""

    name: str
    config: RolloutCorrectionConfig
    columns: Mapping[str, Interval]
    """Columns of ``_FORMULAS`` and ``effective_batch``, which are shares or relative to no correction, and:

    ``bias``: distance of the expected update from the reference's expected update, relative to the latter's
    length; negative where the estimate of its square is negative by chance. ``noise``: standard deviation of
    the update of a batch, relative to the same length. ``error``: mean squared error of the update of a
    batch, bias and noise, relative to the mean square of the reference's update of one prompt.
    """
    error_draws: Tensor
    """float64 ``[1 + draws]``: ``error`` of all prompts, then of each draw."""


def coefficients(batch: RecordedBatch, config: RolloutCorrectionConfig) -> Tensor:
    """float64 ``[B, T]``: the factor of each token's policy gradient at the first update; 0 where it is
    rejected."""
    result = compute_rollout_correction(
        batch.train,
        batch.rollout,
        batch.mask,
        config.model_copy(update={"diagnostics": "core"}),
        advantages=batch.advantages,
    )
    gaps = (batch.train.double() - batch.rollout).nan_to_num(0.0, 0.0, 0.0)
    # Current over old policy. Before the first update the current policy is the proximal one.
    log_ratios = (gaps if config.bypass_mode else torch.zeros_like(gaps)).requires_grad_()
    signs = torch.where(batch.advantages > 0, 1.0, -1.0).double()
    loss, _ = compute_policy_loss(
        config.named_loss or "vanilla",
        old_log_probs=torch.zeros_like(gaps),
        log_probs=log_ratios,
        advantages=signs,
        loss_mask=batch.mask & result.keep_mask,
        response_mask=batch.mask,
        rollout_is_weights=result.weights if config.applies_weights else None,
        config=batch.clip,
        aggregation="token-sum",
    )
    (gradients,) = torch.autograd.grad(loss, log_ratios)
    return -signs * gradients


def uncapped(batch: RecordedBatch, level: str) -> Tensor:
    """float64 ``[B, T]``: weights without a threshold."""
    config = RolloutCorrectionConfig.model_validate({"rollout_is": level, "rollout_is_threshold": _UNCAPPED})
    return coefficients(batch, config)


def reference_level(batch: RecordedBatch) -> str:
    """``sequence``, whose weights are unbiased, where their variance is small enough; else ``token``.

    It is small enough where the weights keep half of the sample and no sequence has more than a twentieth of
    the sum of their squares. A fitted tail shape is no criterion: few prompts give few values to fit it to.
    """
    weights = uncapped(batch, "sequence").amax(dim=-1)
    squares, num_sequences = weights.square(), batch.mask.any(dim=-1).sum()
    keeps_half = weights.sum().square() > 0.5 * squares.sum() * num_sequences
    return (
        "sequence"
        if bool(keeps_half & (squares.max() <= squares.sum() / min(20, max(len(weights) / 2, 1))))
        else "token"
    )


def bias_updates(
    batch: RecordedBatch, token_coefficients: Sequence[Tensor], blocks: Tensor, count: int
) -> list[Tensor]:
    """Updates of the biases of the sampled tokens' logits, one dimension per bias."""
    size = int(batch.directions.max()) + 1
    places = (blocks[:, None] * size + batch.directions).flatten()
    # The gradient of log p(y) for the bias of y's own logit is 1 - p; other logits' are left out.
    gradient = -torch.expm1(batch.train.double().clamp_max(0.0)).nan_to_num(0.0)
    return [
        torch.zeros(count * size, dtype=torch.float64)
        .index_add_(0, places, (coefficient * gradient).flatten())
        .view(count, size)
        for coefficient in token_coefficients
    ]


def estimate_presets(
    batch: RecordedBatch,
    presets: Mapping[str, RolloutCorrectionConfig],
    batch_size: int | None = None,
    draws: int = DRAWS,
    updates: Updates = bias_updates,
) -> list[Estimate]:
    """Estimates of every preset on the same draws of prompts. ``batch_size``: prompts of an update (default:
    those recorded)."""
    blocks = batch.prompts % min(batch.num_prompts, _MOST_PROMPTS)  # [B]: the prompt of a row, or its block
    count = int(blocks.max()) + 1
    generator = torch.Generator().manual_seed(SEED)
    drawn_blocks = torch.randint(count, (draws, count), generator=generator)
    draw_counts = torch.zeros(1 + draws, count, dtype=torch.float64)  # how often a draw has a block
    draw_counts[0] = 1.0
    draw_counts[1:].scatter_add_(1, drawn_blocks, torch.ones(draws, count, dtype=torch.float64))
    reference = uncapped(batch, reference_level(batch))
    preset_coefficients = {name: coefficients(batch, config) for name, config in presets.items()}
    share = count / batch.num_prompts * batch.advantages.double().nan_to_num(0.0, 0.0, 0.0)
    corrections = (reference, coefficients(batch, RolloutCorrectionConfig()), *preset_coefficients.values())
    reference_updates, uncorrected_updates, *preset_updates = updates(
        batch, [share * correction for correction in corrections], blocks, count
    )
    prompts_per_block = batch.num_prompts / count  # a block's noise is that of so many prompts
    signal = _mean_product(reference_updates, draw_counts)
    reference_square = signal.clamp_min(0.0) + prompts_per_block * (
        _mean_square(reference_updates, draw_counts) - signal.clamp_min(0.0)
    ).clamp_min(0.0)
    prompts_per_update = batch_size or batch.num_prompts
    estimates = []
    for (name, config), block_updates in zip(presets.items(), preset_updates, strict=True):
        sums = {
            column: tuple(
                draw_counts @ torch.zeros(count, dtype=torch.float64).index_add_(0, blocks, part.double())
                for part in parts
            )
            for column, parts in _columns(batch, config, preset_coefficients[name], reference).items()
        }
        columns = {column: _FORMULAS[column](*parts) for column, parts in sums.items()}
        if updates is not bias_updates:
            columns |= _update_columns(block_updates, uncorrected_updates, reference_updates, draw_counts)
        squared_bias = _mean_product(block_updates - reference_updates, draw_counts)
        noise = prompts_per_block * (
            _mean_square(block_updates, draw_counts) - _mean_product(block_updates, draw_counts)
        ).clamp_min(0.0)
        error = (squared_bias + noise / prompts_per_update) / reference_square
        relative = squared_bias / signal
        columns |= {
            "effective_batch": columns["ess_rows"] * (1 - columns["rejected_rows"]),
            # Without a signal the update is all noise.
            "bias": torch.where(signal > 0, relative.sign() * relative.abs().sqrt(), torch.nan),
            "noise": torch.where(signal > 0, (noise / prompts_per_update / signal).sqrt(), torch.nan),
            "error": error,
        }
        intervals = {column: Interval.from_draws(values) for column, values in columns.items()}
        estimates.append(Estimate(name, config, intervals, error))
    return estimates


def _update_columns(
    updates: Tensor, uncorrected: Tensor, reference: Tensor, draw_counts: Tensor
) -> dict[str, Tensor]:
    """Norm and cosines of the update of a draw, noise included, float64 ``[1 + draws]`` each; they replace
    those that count tokens one by one."""
    square = _summed_product(updates, updates, draw_counts)
    uncorrected_square = _summed_product(uncorrected, uncorrected, draw_counts)
    reference_square = _summed_product(reference, reference, draw_counts)
    return {
        "norm": _share(square, uncorrected_square).sqrt(),
        "cosine": _cosine(_summed_product(updates, uncorrected, draw_counts), square, uncorrected_square),
        "cosine_to_reference": _cosine(
            _summed_product(updates, reference, draw_counts), square, reference_square
        ),
    }


def _summed_product(first: Tensor, second: Tensor, draw_counts: Tensor) -> Tensor:
    """float64 ``[1 + draws]``: product of two updates ``[blocks, D]``, summed over the blocks of a draw."""
    if first.shape[1] > len(first):
        return ((draw_counts @ (first @ second.T)) * draw_counts).sum(dim=-1)
    return ((draw_counts @ first) * (draw_counts @ second)).sum(dim=-1)


def _mean_product(updates: Tensor, draw_counts: Tensor) -> Tensor:
    """float64 ``[1 + draws]``: mean product of the ``updates`` ``[blocks, D]`` of two different blocks. It is
    the squared length of the expected update, without noise."""
    squares = draw_counts.square() @ updates.square().sum(dim=-1)
    pairs = draw_counts.sum(dim=-1).square() - draw_counts.square().sum(dim=-1)
    return (_summed_product(updates, updates, draw_counts) - squares) / pairs


def _mean_square(updates: Tensor, draw_counts: Tensor) -> Tensor:
    """float64 ``[1 + draws]``: mean squared length of a block's update."""
    return (draw_counts @ updates.square().sum(dim=-1)) / draw_counts.sum(dim=-1)


def _columns(
    batch: RecordedBatch, config: RolloutCorrectionConfig, correction: Tensor, reference: Tensor
) -> dict[str, tuple[Tensor, ...]]:
    """By column, the contribution of every row to each of its sums, ``[B]``; ``correction`` and ``reference``
    are coefficients ``[B, T]``."""
    mask = batch.mask.double()
    tokens, kept_tokens = mask.sum(dim=-1), (correction != 0).double() * mask
    has_tokens = (tokens > 0).double()
    squares = batch.gradients * batch.advantages.double().square().nan_to_num(0.0, 0.0, 0.0) * mask
    raw = uncapped(batch, config.rollout_is) if config.rollout_is is not None else correction
    row_weight = correction.sum(dim=-1) / tokens.clamp_min(1.0)
    rejected = mask - kept_tokens
    rejected_row = has_tokens * (kept_tokens.sum(dim=-1) == 0)
    is_long = (tokens > tokens[tokens > 0].median()).double() if bool((tokens > 0).any()) else tokens
    correct, negative = (batch.scores > 0).double(), (batch.advantages < 0).double()
    column_tokens = {
        "ess_tokens": (correction, correction.square(), kept_tokens),
        "clipped": ((raw - correction).clamp_min(0.0) * kept_tokens, raw * kept_tokens),
        "rejected_tokens": (rejected, mask),
        "rejected_correct": (rejected * correct[:, None], rejected),
        "rejected_long": (rejected * is_long[:, None], rejected),
        "rejected_negative": (rejected * negative, rejected),
        "norm": (correction.square() * squares, squares),
        "cosine": (correction * squares, correction.square() * squares, squares),
        "cosine_to_reference": (
            correction * reference * squares,
            correction.square() * squares,
            reference.square() * squares,
        ),
    }
    column_rows = {
        column: tuple(part.sum(dim=-1) for part in parts) for column, parts in column_tokens.items()
    }
    return column_rows | {
        "ess_rows": (row_weight, row_weight.square(), has_tokens - rejected_row),
        "rejected_rows": (rejected_row, has_tokens),
    }


def _share(part: Tensor, total: Tensor) -> Tensor:
    return torch.where(total > 0, part / total.clamp_min(1e-300), 0.0)


def _effective_share(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    return _share(total.square(), squares * count)


def _cosine(product: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return _share(product, (first * second).sqrt())


_FORMULAS: Mapping[str, Callable[..., Tensor]] = {
    "ess_tokens": _effective_share,
    "ess_rows": _effective_share,
    "clipped": _share,
    "rejected_tokens": _share,
    "rejected_rows": _share,
    "rejected_correct": _share,
    "rejected_long": _share,
    "rejected_negative": _share,
    "norm": lambda part, total: _share(part, total).sqrt(),
    "cosine": _cosine,
    "cosine_to_reference": _cosine,
}
