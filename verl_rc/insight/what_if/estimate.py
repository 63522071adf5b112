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
"""Prompts beyond it are joined to so many blocks: bias needs every pair of them."""
_UNCAPPED = 4.9e8
"""A bound above every weight: log-weights are clamped to 20."""
_BAND = (0.05, 0.95)

Updates = Callable[[RecordedBatch, Sequence[Tensor], Tensor, int], Sequence[Tensor]]
"""Updates of blocks of prompts: of a batch, of each of several pulls ``[B, T]`` that multiply the tokens'
gradients, with the block of each row ``[B]`` and how many blocks there are, float64 ``[blocks, D]``."""


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
    """Those of ``_FORMULAS`` and ``effective_batch``: shares, or relative to no correction. And

    ``bias``: distance of the expected update from the reference's, relative to its length; below 0: its
    square was, by chance. ``noise``: standard deviation of the update of a batch, relative to the length of
    the reference's expected one. ``error``: mean squared error of the update of a batch, bias and noise,
    relative to the mean square of one prompt's reference.
    """
    error_draws: Tensor
    """float64 ``[1 + draws]``."""


def coefficients(batch: RecordedBatch, config: RolloutCorrectionConfig) -> Tensor:
    """float64 ``[B, T]``: what each token's policy gradient is multiplied by at the first update; 0 where it
    is rejected."""
    result = compute_rollout_correction(
        batch.train,
        batch.rollout,
        batch.mask,
        config.model_copy(update={"diagnostics": "core"}),
        advantages=batch.advantages,
    )
    gaps = (batch.train.double() - batch.rollout).nan_to_num(0.0, 0.0, 0.0)
    # Of current and old policy. The current one is still the one that recomputed the log-probs.
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
    """``sequence``, which is unbiased, where its weights have a variance that such a batch can bear; else
    ``token``.

    They do where they keep half of the sample, and no row has more than a twentieth of the sum of their
    squares.
    """
    # Not the shape of a fitted tail: few different prompts give it few different values to be fitted to.
    weights = uncapped(batch, "sequence").amax(dim=-1)
    squares, num_answers = weights.square(), batch.mask.any(dim=-1).sum()
    keeps_half = weights.sum().square() > 0.5 * squares.sum() * num_answers
    return (
        "sequence"
        if bool(keeps_half & (squares.max() <= squares.sum() / min(20, max(len(weights) / 2, 1))))
        else "token"
    )


def bias_updates(batch: RecordedBatch, pulls: Sequence[Tensor], blocks: Tensor, count: int) -> list[Tensor]:
    """Updates of the biases of the sampled tokens' logits, or along the directions that the batch has."""
    if batch.directions.ndim == 3:
        row_updates = [torch.einsum("bt,btd->bd", pull, batch.directions) for pull in pulls]
        return [
            torch.zeros(count, rows.shape[1], dtype=torch.float64).index_add_(0, blocks, rows)
            for rows in row_updates
        ]
    size = int(batch.directions.max()) + 1
    places = blocks[:, None] * size + batch.directions
    # The gradient of log p(y) for the bias of y's own logit is 1 - p; other logits' are left out.
    gradient = -torch.expm1(batch.train.double().clamp_max(0.0)).nan_to_num(0.0)

    def of(pull: Tensor) -> Tensor:
        flat = torch.zeros(count * size, dtype=torch.float64)
        return flat.index_add_(0, places.flatten(), (pull * gradient).flatten()).view(count, size)

    return [of(pull) for pull in pulls]


def estimate_presets(
    batch: RecordedBatch,
    presets: Mapping[str, RolloutCorrectionConfig],
    batch_size: int | None = None,
    draws: int = DRAWS,
    updates: Updates = bias_updates,
) -> list[Estimate]:
    """Estimates of every preset on the same draws of prompts. ``batch_size``: prompts of an update (default:
    those recorded)."""
    # The prompt of each row ``[B]``, or the block of prompts.
    blocks = batch.prompts % min(batch.num_prompts, _MOST_PROMPTS)
    count = int(blocks.max()) + 1
    generator = torch.Generator().manual_seed(SEED)
    block_numbers = torch.randint(count, (draws, count), generator=generator)
    weights = torch.cat([torch.ones(1, count, dtype=torch.float64), _counts(block_numbers, count)])
    reference = uncapped(batch, reference_level(batch))
    used_by = {name: coefficients(batch, config) for name, config in presets.items()}
    share = count / batch.num_prompts * batch.advantages.double().nan_to_num(0.0, 0.0, 0.0)
    corrections = (reference, coefficients(batch, RolloutCorrectionConfig()), *used_by.values())
    pull, plain, *preset_updates = updates(
        batch, [share * weights_used for weights_used in corrections], blocks, count
    )
    prompts_per_block = batch.num_prompts / count  # a block's noise is that of so many prompts
    signal = _mean_product(pull, weights)
    unit = signal.clamp_min(0.0) + prompts_per_block * (
        _mean_square(pull, weights) - signal.clamp_min(0.0)
    ).clamp_min(0.0)
    per_update = batch_size or batch.num_prompts
    estimates = []
    for (name, config), preset_update in zip(presets.items(), preset_updates, strict=True):
        weights_used = used_by[name]
        columns = _columns(batch, config, weights_used, reference)
        sums = {
            column: tuple(weights @ _by_block(part, blocks, count) for part in parts)
            for column, parts in columns.items()
        }
        intervals = {column: Interval.from_draws(_FORMULAS[column](*parts)) for column, parts in sums.items()}
        if updates is not bias_updates:
            intervals |= _of_whole_updates(preset_update, plain, pull, weights)
        effective = _effective_share(*sums["ess_rows"]) * (1 - _share(*sums["rejected_rows"]))
        deviation = preset_update - pull
        squared_bias = _mean_product(deviation, weights)
        noise = prompts_per_block * (
            _mean_square(preset_update, weights) - _mean_product(preset_update, weights)
        ).clamp_min(0.0)
        error = (squared_bias + noise / per_update) / unit
        relative = squared_bias / signal
        # Without a signal the update is all noise.
        bias = torch.where(signal > 0, relative.sign() * relative.abs().sqrt(), torch.nan)
        spread = torch.where(signal > 0, (noise / per_update / signal).sqrt(), torch.nan)
        further = {"effective_batch": effective, "bias": bias, "noise": spread, "error": error}
        intervals |= {column: Interval.from_draws(values) for column, values in further.items()}
        estimates.append(Estimate(name, config, intervals, error))
    return estimates


def _counts(block_numbers: Tensor, count: int) -> Tensor:
    return torch.zeros(len(block_numbers), count, dtype=torch.float64).scatter_add_(
        1, block_numbers, torch.ones_like(block_numbers, dtype=torch.float64)
    )


def _by_block(rows: Tensor, blocks: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64).index_add_(0, blocks, rows.double())


def _of_whole_updates(
    update: Tensor, plain: Tensor, reference: Tensor, weights: Tensor
) -> dict[str, Interval]:
    """Norm and cosines of the whole update, noise included, instead of those that count tokens one by one."""

    def product(first: Tensor, second: Tensor) -> Tensor:
        return ((weights @ (first @ second.T)) * weights).sum(dim=-1)

    square, plain_square = product(update, update), product(plain, plain)
    columns = {
        "norm": _share(square, plain_square).sqrt(),
        "cosine": _cosine(product(update, plain), square, plain_square),
        "cosine_to_reference": _cosine(product(update, reference), square, product(reference, reference)),
    }
    return {name: Interval.from_draws(values) for name, values in columns.items()}


def _mean_product(updates: Tensor, weights: Tensor) -> Tensor:
    """float64 ``[1 + draws]``: mean product of two different blocks' ``updates`` ``[blocks, D]``, the squared
    length of the expected update without the part that is noise."""
    if updates.shape[1] > len(updates):
        whole = ((weights @ (updates @ updates.T)) * weights).sum(dim=-1)
    else:
        whole = (weights @ updates).square().sum(dim=-1)
    total = whole - weights.square() @ updates.square().sum(dim=-1)
    pairs = weights.sum(dim=-1).square() - weights.square().sum(dim=-1)
    return total / pairs


def _mean_square(updates: Tensor, weights: Tensor) -> Tensor:
    """float64 ``[1 + draws]``: mean squared length of a block's update."""
    return (weights @ updates.square().sum(dim=-1)) / weights.sum(dim=-1)


def _columns(
    batch: RecordedBatch, config: RolloutCorrectionConfig, weights: Tensor, reference: Tensor
) -> dict[str, tuple[Tensor, ...]]:
    """By column what every row adds to the sums that it is made of, ``[B]`` each."""
    mask = batch.mask.double()
    tokens, kept_tokens = mask.sum(dim=-1), (weights != 0).double() * mask
    has_tokens = (tokens > 0).double()
    squares = batch.gradients * batch.advantages.double().square().nan_to_num(0.0, 0.0, 0.0) * mask
    raw = uncapped(batch, config.rollout_is) if config.rollout_is is not None else weights
    row_weight = weights.sum(dim=-1) / tokens.clamp_min(1.0)
    rejected = mask - kept_tokens
    rejected_row = has_tokens * (kept_tokens.sum(dim=-1) == 0)
    is_long = (tokens > tokens[tokens > 0].median()).double() if bool((tokens > 0).any()) else tokens
    correct, negative = (batch.scores > 0).double(), (batch.advantages < 0).double()

    def summed(values: Tensor) -> Tensor:
        return values.sum(dim=-1)

    return {
        "ess_tokens": (summed(weights), summed(weights.square()), summed(kept_tokens)),
        "ess_rows": (row_weight, row_weight.square(), has_tokens - rejected_row),
        "clipped": (summed((raw - weights).clamp_min(0.0) * kept_tokens), summed(raw * kept_tokens)),
        "rejected_tokens": (summed(rejected), tokens),
        "rejected_rows": (rejected_row, has_tokens),
        "rejected_correct": (summed(rejected) * correct, summed(rejected)),
        "rejected_long": (summed(rejected) * is_long, summed(rejected)),
        "rejected_negative": (summed(rejected * negative), summed(rejected)),
        "norm": (summed(weights.square() * squares), summed(squares)),
        "cosine": (summed(weights * squares), summed(weights.square() * squares), summed(squares)),
        "cosine_to_reference": (
            summed(weights * reference * squares),
            summed(weights.square() * squares),
            summed(reference.square() * squares),
        ),
    }


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp_min(1e-300), 0.0)


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
    "norm": lambda part, whole: _share(part, whole).sqrt(),
    "cosine": _cosine,
    "cosine_to_reference": _cosine,
}
