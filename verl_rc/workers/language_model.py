"""Loading a causal language model and running it over packed sequences."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from verl_rc.workers.packed_attention import PACKED_ATTENTION, PackedLayout


def load_causal_lm(
    path: str, dtype: torch.dtype, gradient_checkpointing: bool = False, trust_remote_code: bool = False
) -> nn.Module:
    """Load a Hugging Face causal language model whose attention understands packed input.

    Raises ``ValueError`` when ``path`` looks like a folder but holds no model.
    """
    folder = Path(path).expanduser()
    if path.startswith((".", "/", "~")) and not (folder / "config.json").is_file():
        raise ValueError(
            f"actor_rollout_ref.model.path must be a Hugging Face model folder with a config.json, got {path!r}. "
            "Give the folder of a model (scripts/make_tiny_model.py writes a small one) or a hub id."
        )
    source = str(folder) if folder.exists() else path
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    model = AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=dtype, attn_implementation=PACKED_ATTENTION, trust_remote_code=trust_remote_code
    )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def packed_logits(model: nn.Module, token_ids: Tensor, lengths: Tensor | list[int], keep: Tensor | None = None) -> Tensor:
    """Logits of packed sequences.

    ``token_ids`` is int64 ``[N]``, sequences one after the other; ``lengths`` int64 ``[S]`` their token counts (sum N);
    ``keep`` (int64 ``[K]``, optional) the packed positions whose logits are wanted. Returns ``[N, V]`` or ``[K, V]``.
    """
    layout = PackedLayout.from_lengths(torch.as_tensor(lengths, device=token_ids.device))
    if layout.grid_index.numel() != token_ids.numel():
        raise ValueError(f"lengths must sum to the number of tokens {token_ids.numel()}, got {layout.grid_index.numel()}.")
    output = model(
        input_ids=token_ids[None],
        position_ids=layout.position_ids[None],
        attention_mask=None,
        use_cache=False,
        logits_to_keep=0 if keep is None else keep,
        packed_layout=layout,
    )
    return output.logits[0]


def padded_logits(model: nn.Module, token_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Logits ``[B, S, V]`` of right-padded sequences ``token_ids`` ``[B, S]`` (``use_remove_padding=False``).

    Padding lies on the right, so a causal mask alone keeps it out of sight of real tokens.
    """
    position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    return model(input_ids=token_ids, position_ids=position_ids, attention_mask=None, use_cache=False).logits
