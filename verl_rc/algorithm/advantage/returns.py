"""Advantage estimators from returns: λ-returns with a critic, returns-to-go without one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.algorithm.advantage.inputs import AdvantageInputs, register_advantage_estimator, required
from verl_rc.tensor_ops import masked_whiten

_CHUNK = 64


@dataclass(frozen=True)
class ResponseOrder:
    """Maps each position to the number of its response token in the row.

    A position outside the mask (tool output, padding) maps to the response token before it, or to the first
    one when there is none before it: that token is credited with its reward.
    """

    mask: Tensor
    """[B, T], bool; the response tokens."""
    slot: Tensor
    """[B, T], int64; number of the response token within the row."""

    @classmethod
    def from_mask(cls, response_mask: Tensor) -> "ResponseOrder":
        """Number the response tokens of each row from 0."""
        mask = response_mask.bool()
        return cls(mask, (mask.cumsum(dim=-1) - 1).clamp_(min=0))

    def pack(self, values: Tensor) -> Tensor:
        """Move the values of response tokens to the left of the row, without gaps; 0 elsewhere."""
        return self._scatter(values.where(self.mask, 0))

    def pack_rewards(self, rewards: Tensor) -> Tensor:
        """Move rewards to the left like ``pack``, crediting one outside the mask to the response token before
        it.

        All finite rewards count unless the row has no response token; NaN and infinities outside the mask
        are dropped.
        """
        return self._scatter(zero_nonfinite_outside(rewards, self.mask))

    def unpack(self, packed: Tensor) -> Tensor:
        """Move packed values back to their positions; 0 outside the mask."""
        return packed.gather(-1, self.slot).where(self.mask, 0)

    def _scatter(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter_add(-1, self.slot, values)


def zero_nonfinite_outside(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Set NaN and infinities outside the response to 0, [B, T]."""
    return torch.where(response_mask, rewards, rewards.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))


def discounted_suffix_sums(terms: Tensor, discount: float) -> Tensor:
    """Solve x_t = b_t + c · x_{t+1} along the last dimension, with x = 0 past its end.

    Blocks of 64 positions are one matrix product with c^(j − i); the blocks' first values obey the same
    recursion with c^64, so the function calls itself on them. No loop over time: log_64(T) steps.

    Args:
        terms: [B, T], b.
        discount: c, in [0, 1].

    Returns:
        x: [B, T], in the unit of ``terms``.
    """
    rows, length = terms.shape
    chunk = min(_CHUNK, max(length, 1))
    padded = torch.nn.functional.pad(terms, (0, -length % chunk))
    blocks = padded.view(rows, padded.shape[1] // chunk, chunk)
    steps = torch.arange(chunk, device=terms.device)
    gap = steps.unsqueeze(1) - steps
    powers = torch.full_like(gap, discount, dtype=terms.dtype).pow(gap.clamp(min=0)) * (gap >= 0)
    sums = blocks @ powers
    if blocks.shape[1] > 1:
        starts = discounted_suffix_sums(sums[:, :, 0], discount**chunk)
        following = torch.nn.functional.pad(starts[:, 1:], (0, 1))
        decay = torch.full_like(steps, discount, dtype=terms.dtype).pow(chunk - steps)
        sums.addcmul_(following.unsqueeze(-1), decay)
    return sums.reshape(padded.shape)[:, :length]


@register_advantage_estimator("gae")
def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438) over response tokens, whitened over the batch
    afterwards.

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γ λ A_{t+1}, where t + 1 is the row's next *response* token:
    tokens between turns are no decisions of the policy. After the last one V and A are 0.

    Returns:
        Advantages and returns A + V, in units of reward, [B, T].
    """
    values = required(inputs.values, "values", "gae")
    returns = generalised_returns(
        inputs.token_level_rewards, values, inputs.response_mask, inputs.gamma, inputs.lam
    )
    return returns - values.where(inputs.response_mask, 0), returns


def generalised_returns(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """Compute the λ-returns A_t + V_t of the response tokens, 0 elsewhere.

    Args:
        rewards: [B, T], in units of reward.
        values: [B, T], in units of reward.
        response_mask: [B, T], bool.
        gamma: discount per response token, in [0, 1].
        lam: decay of the estimator per response token, in [0, 1].

    Returns:
        [B, T], in units of reward; summed in float64.
    """

    order = ResponseOrder.from_mask(response_mask)
    packed_values = order.pack(values).to(torch.float64)
    residuals = order.pack_rewards(rewards) - packed_values
    residuals[:, :-1] += gamma * packed_values[:, 1:]
    packed_returns = discounted_suffix_sums(residuals, gamma * lam).add_(packed_values)
    return order.unpack(packed_returns.to(rewards.dtype))


@register_advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Discounted returns-to-go (REINFORCE++, arXiv:2501.03262), whitened over the batch afterwards.

    A_t = G_t = r_t + γ G_{t+1}, where t + 1 is the row's next response token.

    Returns:
        Advantages and returns G, in units of reward, [B, T].
    """
    returns = returns_to_go(inputs.token_level_rewards, inputs.response_mask, inputs.gamma)
    return returns.clone(), returns


@register_advantage_estimator("remax")
def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Returns-to-go minus the score of the prompt's greedy answer (ReMax, arXiv:2310.10505); undiscounted.

    Returns:
        Advantages and returns, in units of reward, [B, T].

    Raises:
        ValueError: when ``reward_baselines`` is missing or does not have one entry per row.
    """
    baselines = required(inputs.reward_baselines, "reward_baselines", "remax")
    if baselines.shape != inputs.response_mask.shape[:1]:
        raise ValueError(
            f"reward_baselines must hold one score per row, [{inputs.response_mask.shape[0]}]; got "
            f"{tuple(baselines.shape)}"
        )
    returns = returns_to_go(inputs.token_level_rewards, inputs.response_mask, 1.0)
    advantages = returns - baselines.to(returns.dtype).unsqueeze(-1)
    return advantages.where(inputs.response_mask, 0), returns


def returns_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Compute G_t = r_t + γ G_{t+1} over the response tokens of each row, 0 elsewhere.

    Args:
        rewards: [B, T], in units of reward.
        response_mask: [B, T], bool.
        gamma: discount per response token, in [0, 1].

    Returns:
        [B, T], in units of reward; summed in float64.
    """

    order = ResponseOrder.from_mask(response_mask)
    packed = discounted_suffix_sums(order.pack_rewards(rewards).to(torch.float64), gamma)
    return order.unpack(packed.to(rewards.dtype))


def whitened(advantages: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages of a whole batch, whitened over ``mask`` (bool), and returns; all of one shape. Returns that
    are the advantages stay so."""
    centred = masked_whiten(advantages, mask, minuends=returns)
    return centred, centred if returns is advantages else returns
