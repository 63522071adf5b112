"""Loading a transformer with a language-model or value head, and running it over packed sequences, linear layers on real
tokens only."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.distributed import DistributedConfig

from verl_rc.config.models import model_source
from verl_rc.distributed.fsdp import cut_parameters
from verl_rc.distributed.process_group import DeviceMesh
from verl_rc.workers.scoring_head import add_scoring

_SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a precision: ``fp32``, ``bf16``, ``fp16``, or torch's own name."""
    dtype: torch.dtype = getattr(torch, _SHORT_NAMES.get(name, name))
    return dtype


PACKED_ATTENTION = "verl_rc_packed_sdpa"


@dataclass(frozen=True)
class PackedLayout:
    """Where each packed token lies in a padded ``[num_sequences, max_length]`` grid."""

    grid_index: Tensor
    """int64 ``[N]``: ``row * max_length + position`` of every packed token."""
    position_ids: Tensor
    """int64 ``[N]``: position within the own sequence, restarting at 0."""
    num_sequences: int
    max_length: int

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> "PackedLayout":
        """Lay out sequences of ``lengths`` (int64 ``[S]``, tokens, each at least 1) one after the other."""
        if lengths.ndim != 1 or lengths.numel() == 0 or int(lengths.min()) < 1:
            raise ValueError(f"packing needs a list of sequence lengths >= 1, got {lengths.tolist()}.")
        num_sequences, max_length = lengths.numel(), int(lengths.max())
        rows = torch.repeat_interleave(torch.arange(num_sequences, device=lengths.device), lengths)
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(rows.numel(), device=lengths.device) - starts[rows]
        return cls(rows * max_length + positions, positions, num_sequences, max_length)


def packed_sdpa(  # noqa: PLR0913  (the signature transformers calls)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence.

    ``query``, ``key``, ``value`` are ``[1, heads, N, head_dim]`` over packed tokens. Rows are padded on the right,
    where a
    causal mask alone keeps padding out of every real token's sight. Without a layout it is plain padded attention.
    Called by transformers through its ``AttentionInterface``, whose signature it must have.
    """
    grouped = key.shape[1] != query.shape[1]
    if packed_layout is None:
        # With one query position is_causal would mask all keys but the first.
        causal = attention_mask is None and query.shape[2] > 1
        output = F.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
        return output.transpose(1, 2).contiguous(), None
    rows, width, index = packed_layout.num_sequences, packed_layout.max_length, packed_layout.grid_index

    # Padded for attention only, which took a third of the time of a block mask over all
    # packed tokens, whose cost grows with the square of their number.
    def to_grid(packed: Tensor) -> Tensor:
        heads, head_dim = packed.shape[1], packed.shape[3]
        # index_copy and index_select have gradients and need no size from the device.
        grid = packed.new_zeros(rows * width, heads, head_dim).index_copy(0, index, packed[0].transpose(0, 1))
        return grid.view(rows, width, heads, head_dim).transpose(1, 2)

    output = F.scaled_dot_product_attention(
        to_grid(query), to_grid(key), to_grid(value), dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    flat = output.transpose(1, 2).reshape(rows * width, output.shape[1], output.shape[3])
    return flat.index_select(0, index)[None], None


AttentionInterface.register(PACKED_ATTENTION, packed_sdpa)


def load_causal_lm(
    path: str,
    dtype: torch.dtype,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Load a Hugging Face causal language model whose attention understands packed input and which can score tokens.

    With ``mesh``, each of its ranks reads its shards alone; ``shard_model`` must follow before a forward pass.

    Raises ``ValueError`` when ``path`` looks like a folder but holds no model, or one whose logits are computed in another way
    than by a linear layer.
    """
    source, arguments = _model_source(path, dtype, trust_remote_code)
    with _reading_shards(mesh) as further:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(source, **arguments, **further)
    return add_scoring(_with_checkpointing(model, gradient_checkpointing))


def load_value_model(
    path: str,
    dtype: torch.dtype,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Load a transformer with a scalar head: output 0 of a position is the value of what comes after it.

    A model without a value head (a language model) gets one of zeros, so that the first values are 0 instead of noise. ``mesh``
    as in ``load_causal_lm``. Raises ``ValueError`` when ``path`` holds no model, or one whose head gives more than one number.
    """
    source, arguments = _model_source(path, dtype, trust_remote_code)
    config = arguments["config"]
    # Dropout would give old and new values of the same weights different numbers.
    config.num_labels, config.classifier_dropout = 1, 0.0
    try:
        with _reading_shards(mesh) as further:
            model, loading = AutoModelForTokenClassification.from_pretrained(
                source, output_loading_info=True, **arguments, **further
            )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"critic.model.path must be a language model, or one with a value head of one output, got {path!r}: {error}"
        ) from error
    head = model.get_submodule("score")
    # transformers initialises a missing head at random, and says so only in a warning.
    if any(name.startswith("score.") for name in loading["missing_keys"]):
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
    return _with_checkpointing(model, gradient_checkpointing)


@contextmanager
def _reading_shards(mesh: DeviceMesh | None) -> Iterator[dict[str, Any]]:
    """Arguments with which ``from_pretrained`` reads only this rank's shards into memory; none for a whole model.

    transformers builds a model without weights, calls ``maybe_distribute_model``, and then reads of each tensor what the
    parameter holds on this rank. Its own distribution needs a plan from the model's class and knows no adapters.
    """
    if mesh is None:
        yield {}
        return

    def cut(_: type, model: Any, *__: Any) -> Any:
        cut_parameters(model, mesh)
        del model.config.distributed_config
        return model

    with ExitStack() as undo:
        # The base class has the method from its own base class, so that removing ours restores it.
        patched: Any = PreTrainedModel
        patched.maybe_distribute_model = classmethod(cut)
        undo.callback(delattr, patched, "maybe_distribute_model")
        # One tensor after the other: memory that several threads have freed is not given back.
        undo.enter_context(_variable("HF_DEACTIVATE_ASYNC_LOAD", "1"))
        yield {"distributed_config": DistributedConfig()}


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """An environment variable inside the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _model_source(path: str, dtype: torch.dtype, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    source = model_source(path)
    if path.startswith((".", "/", "~")) and not (Path(source) / "config.json").is_file():
        raise ValueError(
            f"a model's path must be a Hugging Face model folder with a config.json, got {path!r}. "
            "Give the folder of a model (scripts/make_tiny_model.py writes a small one) or a hub id."
        )
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    arguments = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": PACKED_ATTENTION,
        "trust_remote_code": trust_remote_code,
    }
    return source, arguments


def _with_checkpointing(model: nn.Module, enabled: bool) -> nn.Module:
    if enabled:
        checkpointed: Any = model
        # PyTorch's reentrant checkpoints do not work where no input needs a gradient, as with LoRA's frozen
        # embeddings.
        checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def packed_logits(model: nn.Module, token_ids: Tensor, lengths: Tensor | list[int], keep: Tensor | None = None) -> Tensor:
    """Logits (or, of a value model, values) of packed sequences: ``[N, V]``, or with ``keep`` ``[K, V]``.

    ``token_ids`` and ``lengths`` are those of ``packed_inputs``; ``keep`` (int64 ``[K]``) are packed positions.
    """
    # transformers' logits_to_keep takes positions: no logits are computed for prompts.
    selection = {} if keep is None else {"logits_to_keep": keep}
    logits: Tensor = model(**packed_inputs(token_ids, lengths), **selection).logits
    return logits[0]


def packed_inputs(token_ids: Tensor, lengths: Tensor | list[int]) -> dict[str, Any]:
    """Arguments of a model's forward pass over packed sequences.

    ``token_ids`` is int64 ``[N]``, sequences one after the other; ``lengths`` int64 ``[S]`` their token counts (sum N).
    """
    layout = PackedLayout.from_lengths(torch.as_tensor(lengths, device=token_ids.device))
    if layout.grid_index.numel() != token_ids.numel():
        raise ValueError(f"lengths must sum to the number of tokens {token_ids.numel()}, got {layout.grid_index.numel()}.")
    return {
        "input_ids": token_ids[None],
        "position_ids": layout.position_ids[None],
        "attention_mask": None,
        "use_cache": False,
        "packed_layout": layout,
    }


def padded_inputs(token_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    """Arguments of a model's forward pass over right-padded sequences ``token_ids`` ``[B, S]`` (``use_remove_padding=False``).

    Padding lies on the right, so a causal mask alone keeps it out of sight of real tokens.
    """
    position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    return {"input_ids": token_ids, "position_ids": position_ids, "attention_mask": None, "use_cache": False}
