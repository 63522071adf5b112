"""Attention within packed sequences, as transformers calls it, and which models it cannot serve."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from verl_rc.runtime.workers.packed_layout import Branches, PackedLayout
from verl_rc.runtime.workers.sinks import GridKernel, PackedKernel, attend_with_sinks
from verl_rc.tensor_ops import gathered_rows

PACKED_ATTENTION = "verl_rc_packed"
"""Without "sdpa" in it, which transformers would look up in what a model supports."""


def packed_sdpa(  # noqa: PLR0913  (the parameters that transformers passes)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence.

    ``query``, ``key``, ``value`` are ``[1, heads, N, head_dim]`` over packed tokens, or over this rank's part
    of them. Without a layout it is plain causal attention over rows that are padded on the right, where no
    real token sees padding. The parameters are those of transformers' ``AttentionInterface``.

    ``sliding_window`` counts the query itself; ``s_aux`` are sinks, ``[heads]``. Raises ``ValueError`` for
    ``softcap``, and for sinks with dropout or with ranks that share heads: they are not built.
    """
    ranks = None if packed_layout is None else packed_layout.ranks
    if softcap is not None or (s_aux is not None and (dropout or ranks is not None)):
        raise ValueError(
            f"{type(module).__name__} wants attention with softcap={softcap}, or sinks with "
            f"dropout={dropout} or sequence parallelism, which is not built. Train another model."
        )
    longest = query.shape[2] if packed_layout is None else packed_layout.longest
    window = None if sliding_window is None or sliding_window >= longest else sliding_window
    how = Weighting(scaling, dropout, window, s_aux)
    if packed_layout is None:
        return _over_grid(query, key, value, how, mask=attention_mask).transpose(1, 2).contiguous(), None
    count = packed_layout.position_ids.numel()
    if ranks is not None:
        query, key, value = (part[:, :, :count] for part in ranks.heads_of_all_tokens(query, key, value))
    attended = _attend(query, key, value, packed_layout, how)
    return attended if ranks is None else ranks.tokens_of_all_heads(attended), None


@dataclass(frozen=True)
class Weighting:
    """How a layer weights values."""

    scaling: float | None
    """Scores are multiplied by it. None means 1 / sqrt(head_dim)."""
    dropout: float
    window: int | None
    """Tokens that a query sees, itself and those before it. None means all."""
    sinks: Tensor | None = None
    """``[heads]``: a further logit of each head's softmax, without a value. None means none."""

    def sees(self, positions: Tensor, num_keys: int) -> Tensor:
        """bool ``[…, Q, K]``: which of ``num_keys`` a query at ``positions`` (int64 ``[…, Q]``) attends
        to."""
        places, keys = positions[..., None], torch.arange(num_keys, device=positions.device)
        sees = keys <= places
        return sees if self.window is None else sees & (keys > places - self.window)


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, how: Weighting) -> Tensor:
    """Attention ``[1, N, heads, head_dim]`` of whole sequences, and of branches behind them."""
    in_one_kernel = runs_flash_kernels(query) and not how.dropout
    end, branches = len(layout.grid_index), layout.branches
    attend = _in_one_kernel if in_one_kernel else _on_grid
    attended = attend(query[:, :, :end], key[:, :, :end], value[:, :, :end], layout, how)
    if branches is None:
        return attended
    attend_branches = _branches_in_one_kernel if in_one_kernel else _branches_on_grids
    own = attend_branches(query[:, :, end:], key, value, branches, how)
    return torch.cat([attended, own], dim=1)


def runs_flash_kernels(query: Tensor) -> bool:
    """Whether FlashAttention's kernel for packed sequences accepts this tensor."""
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    head_dim = query.shape[-1]
    return head_dim % 8 == 0 and head_dim <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _in_one_kernel(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, how: Weighting) -> Tensor:
    """Attention ``[1, N, heads, head_dim]`` by one kernel, without padding."""
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    ends, longest = layout.boundaries, layout.max_length
    return _by_kernel(query, key, value, (ends, ends), (longest, longest), how)


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    how: Weighting,
) -> Tensor:
    """Attention ``[1, tokens, heads, head_dim]`` of packed sequences; ``ends`` and ``longest`` are those of
    queries and keys. The last query of each sequence lies at its last key."""
    # Tokens that a query sees to its left, without itself, and to its right.
    window, grouped = (-1 if how.window is None else how.window - 1, 0), key.shape[1] != query.shape[1]
    if how.sinks is not None:
        kernel = PackedKernel(ends, longest, how.scaling, window, grouped)
        return attend_with_sinks(query, key, value, how.sinks, kernel)[None]
    attended = varlen_attn(
        query, key, value, *ends, *longest, scale=how.scaling, window_size=window, enable_gqa=grouped
    )
    assert isinstance(attended, Tensor)  # it is a pair only with return_aux
    return attended[None]


def _on_grid(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, how: Weighting) -> Tensor:
    """Attention ``[1, N, heads, head_dim]`` over sequences padded to the longest."""
    rows, width, index = layout.num_sequences, layout.max_length, layout.grid_index

    # This took a third of the time of a block mask over all packed tokens, whose cost grows with the square
    # of their number.
    def to_grid(packed: Tensor) -> Tensor:
        heads, head_dim = packed.shape[1], packed.shape[3]
        # index_copy and index_select have gradients and need no size from the device.
        grid = packed.new_zeros(rows * width, heads, head_dim).index_copy(0, index, packed[0].transpose(0, 1))
        return grid.view(rows, width, heads, head_dim).transpose(1, 2)

    output = _over_grid(to_grid(query), to_grid(key), to_grid(value), how)
    flat = output.transpose(1, 2).reshape(rows * width, output.shape[1], output.shape[3])
    return flat.index_select(0, index)[None]


def _over_grid(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    how: Weighting,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention ``[S, heads, Q, head_dim]`` over keys and values ``[S, key heads, K, head_dim]``.

    ``positions`` are those of the queries, int64 ``[S, Q]``. None means that they end where the keys do.
    ``mask`` is that of the caller, in place of causal attention.
    """
    # With one query position is_causal would mask all keys but the first.
    is_plain = positions is None and how.window is None and how.sinks is None
    is_causal = is_plain and mask is None and query.shape[2] == key.shape[2]
    if not is_causal and mask is None:
        ends = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)
        mask = how.sees(ends[None] if positions is None else positions, key.shape[2])[:, None]
    if how.sinks is not None:
        if query.device.type != "cpu":
            raise ValueError(
                f"attention with sinks needs packed rows in bfloat16 or float16 on a GPU, got {query.dtype}."
            )
        assert mask is not None
        scaling = query.shape[-1] ** -0.5 if how.scaling is None else how.scaling
        # The kernel wants as many heads of keys as of queries.
        key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
        return attend_with_sinks(query, key, value, how.sinks, GridKernel(mask, scaling))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        how.dropout,
        is_causal=is_causal,
        scale=how.scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _branches_in_one_kernel(
    query: Tensor, key: Tensor, value: Tensor, branches: Branches, how: Weighting
) -> Tensor:
    """Attention ``[1, own tokens, heads, head_dim]`` of branches over gathered keys and values."""
    keys, values = (gathered_rows(part[0].transpose(0, 1), branches.keys) for part in (key, value))
    return _by_kernel(query[0].transpose(0, 1), keys, values, branches.boundaries, branches.longest, how)


def _branches_on_grids(
    query: Tensor, key: Tensor, value: Tensor, branches: Branches, how: Weighting
) -> Tensor:
    """Attention ``[1, own tokens, heads, head_dim]`` of branches, in grids of those of similar length."""
    attended = query.new_zeros(query.shape[2], query.shape[1], query.shape[3])

    def at(packed: Tensor, index: Tensor) -> Tensor:
        values = gathered_rows(packed[0].transpose(0, 1), index.flatten())
        return values.view(*index.shape, *values.shape[1:]).transpose(1, 2)

    for grid in branches.grids:
        parts = at(query, grid.queries), at(key, grid.keys), at(value, grid.keys)
        output = _over_grid(*parts, how, grid.positions)
        own = output.transpose(1, 2).flatten(0, 1).index_select(0, grid.real)
        attended = attended.index_copy(0, grid.queries.flatten()[grid.real], own)
    return attended[None]


AttentionInterface.register(PACKED_ATTENTION, packed_sdpa)
