"""Loading a transformer with a language-model or value head."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.distributed import DistributedConfig

from verl_rc.config.models import model_source, torch_name
from verl_rc.config.task import PixelLimits
from verl_rc.records.image_reader import ImageReader
from verl_rc.records.vision_models import VISION_FAMILIES
from verl_rc.runtime.distributed.fsdp import cut_parameters
from verl_rc.runtime.distributed.process_group import DeviceMesh
from verl_rc.runtime.exact.trainer import exact_scores, use_engine_operations
from verl_rc.runtime.workers.attention import PACKED_ATTENTION
from verl_rc.runtime.workers.recurrence import separate_sequences
from verl_rc.runtime.workers.scoring_head import add_scoring
from verl_rc.runtime.workers.vision import pictures_by_place

_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
"""This environment variable keeps transformers from reading weights in several threads."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a precision: ``fp32``, ``bf16``, ``fp16``, or torch's own name."""
    dtype: torch.dtype = getattr(torch, torch_name(name))
    return dtype


@dataclass(frozen=True)
class Products:
    """Precisions of products that are not those of the weights."""

    head_dtype: str | None = None
    """Of the logits, by its name. None means that of the hidden states."""
    exact_dtype: torch.dtype | None = None
    """Of all products in exact mode. None means an ordinary run."""


def load_causal_lm(
    path: str,
    dtype: torch.dtype,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    mesh: DeviceMesh | None = None,
    products: Products = Products(),
    pixel_limits: PixelLimits | None = None,
) -> nn.Module:
    """Load a Hugging Face causal language model that takes packed input and scores tokens.

    ``pixel_limits`` are ``data.mm_processor_kwargs``, of a model that reads pictures.
    With ``mesh``, each rank reads its shards alone, and ``shard_model`` must follow before a forward pass.

    Raises ``ValueError`` when ``path`` looks like a folder but holds no model, or when the logits are not
    computed by a linear layer.
    """
    source, arguments = _model_source(path, dtype, trust_remote_code)
    reader = ImageReader.of(path, pixel_limits or {})
    if reader is not None:  # all patches of a picture see each other
        packed = dict.fromkeys(("", "text_config"), PACKED_ATTENTION)
        arguments["attn_implementation"] = {**packed, "vision_config": "sdpa"}
    auto = language_model_class(arguments["config"])
    with _reading_shards(mesh) as sharding:
        model: nn.Module = auto.from_pretrained(source, **arguments, **sharding)
    if reader is not None:
        model = pictures_by_place(model, reader)
    precision = None if products.head_dtype is None else torch_dtype(products.head_dtype)
    model = separate_sequences(_with_checkpointing(model, gradient_checkpointing))
    if products.exact_dtype is None:
        return add_scoring(model, precision)
    return add_scoring(use_engine_operations(model, products.exact_dtype), precision, exact_scores)


def language_model_class(config: Any) -> Any:
    """transformers' class of the language model of a ``config.json``, with its tower if it reads pictures."""
    return AutoModelForImageTextToText if config.model_type in VISION_FAMILIES else AutoModelForCausalLM


def load_value_model(
    path: str,
    dtype: torch.dtype,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Load a transformer with a scalar head, whose output at a position is the value before the next token.

    A language model without a value head gets one of zeros, so that its first values are 0 instead of noise.
    ``mesh`` as in ``load_causal_lm``. Raises ``ValueError`` when ``path`` holds no model, or one whose head
    has more than one output.
    """
    source, arguments = _model_source(path, dtype, trust_remote_code)
    config = arguments["config"]
    # Dropout would give old and new values of the same weights different numbers.
    config.num_labels, config.classifier_dropout = 1, 0.0
    try:
        with _reading_shards(mesh) as sharding:
            model, loading = AutoModelForTokenClassification.from_pretrained(
                source, output_loading_info=True, **arguments, **sharding
            )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            "critic.model.path must be a language model, or one with a value head of one output, got "
            f"{path!r}: {error}"
        ) from error
    head = model.get_submodule("score")
    # transformers initialises a missing head at random, and says so only in a warning.
    if any(name.startswith("score.") for name in loading["missing_keys"]):
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
    return separate_sequences(_with_checkpointing(model, gradient_checkpointing))


@contextmanager
def _reading_shards(mesh: DeviceMesh | None) -> Iterator[dict[str, Any]]:
    """Arguments with which ``from_pretrained`` reads only this rank's shards into memory; none without a
    ``mesh``.

    transformers builds a model without weights, calls ``maybe_distribute_model``, and then reads this rank's
    shard of each tensor. Its own method is replaced: it needs a plan from the model's class and supports no
    adapters.
    """
    if mesh is None:
        yield {}
        return

    def cut(_: type, model: Any, *__: Any) -> Any:
        cut_parameters(model, mesh)
        del model.config.distributed_config
        return model

    with ExitStack() as undo:
        # PreTrainedModel inherits the method, so that deleting the attribute restores it.
        patched: Any = PreTrainedModel
        patched.maybe_distribute_model = classmethod(cut)
        undo.callback(delattr, patched, "maybe_distribute_model")
        # One thread reads: the memory that several threads have freed is not given back.
        if _NO_THREADS not in os.environ:
            os.environ[_NO_THREADS] = "1"
            undo.callback(os.environ.pop, _NO_THREADS)
        yield {"distributed_config": DistributedConfig()}


def _model_source(path: str, dtype: torch.dtype, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    source = model_source(path)
    if path.startswith((".", "/", "~")) and not (Path(source) / "config.json").is_file():
        raise ValueError(
            f"a model's path must be a Hugging Face model folder with a config.json, got {path!r}. Give the "
            "folder of a model (scripts/make_tiny_model.py writes a small one) or a hub id."
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
        # PyTorch's reentrant checkpoints need an input with a gradient, which LoRA's frozen embeddings lack.
        checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
