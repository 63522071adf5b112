"""LoRA adapters in the actor: adding them, switching them off, and merging them into the weights that engines
get."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch import Tensor, nn

from verl_rc.config.models import ModelConfig
from verl_rc.runtime.distributed.fsdp import (
    add_product,
    gather_full_tensors,
    own_rows,
    whole_parameters,
    without_memory,
)
from verl_rc.runtime.weight_sync.manifest import FACTORS
from verl_rc.runtime.weight_sync.sender import ModelWeights, WeightSource, every_name

_ADAPTER = "default"


def add_adapters(model: nn.Module, config: ModelConfig) -> nn.Module:
    """The model with trainable adapters (arXiv:2106.09685) beside frozen weights; itself when ``lora_rank``
    is 0.

    An adapter starts at zero, so that the first policy is the model's own, or from ``lora_adapter_path``.
    Raises ``ValueError`` when the targets match nothing or the output layer, or when that folder has the
    adapters of another model.
    """
    if config.lora_rank == 0:
        return model
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=config.target_modules,
        exclude_modules=config.exclude_modules,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        # PEFT sizes adapters by the weights that it sees, and this rank may hold only shards of them.
        with whole_parameters(model, without_memory):
            adapted: nn.Module = get_peft_model(model, lora)
    except ValueError as error:
        linear = sorted(
            {
                name.rpartition(".")[2]
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear)
            }
        )
        raise ValueError(
            "actor_rollout_ref.model.target_modules must match modules of the model, got "
            f"{config.target_modules!r} (without exclude_modules={config.exclude_modules!r}). Its linear "
            f"layers are {', '.join(linear)}; all-linear takes all of them. ({error})"
        ) from error
    embeddings = sorted(name for name, _ in adapted.named_parameters() if ".lora_embedding_" in name)
    if embeddings:
        raise ValueError(
            "actor_rollout_ref.model.target_modules must name linear layers, whose adapters engines get, got "
            f"{config.target_modules!r}, which also takes {embeddings[0].partition('.lora_')[0]}. Leave it "
            "out, or name it in exclude_modules."
        )
    if not isinstance(model.get_output_embeddings(), nn.Linear):  # type: ignore[operator]
        raise ValueError(
            "actor_rollout_ref.model.target_modules must leave the output layer out, got "
            f"{config.target_modules!r}: log-probs are computed with its plain weight, a chunk at a time. "
            "Take it out of the list, or name it in exclude_modules."
        )
    if config.lora_adapter_path is not None:
        _load_adapters(adapted, str(Path(config.lora_adapter_path).expanduser()))
    return adapted


def _load_adapters(model: nn.Module, folder: str) -> None:
    """Raises ``ValueError`` when the adapters of the folder are not those of the model."""
    loaded = set_peft_model_state_dict(model, load_peft_weights(folder, device="cpu"))
    missing = [name for name in loaded.missing_keys if ".lora_" in name]
    if missing or loaded.unexpected_keys:
        raise ValueError(
            "actor_rollout_ref.model.lora_adapter_path must have the adapters of the model's modules, but "
            f"{folder} lacks {missing[:3]} and has {loaded.unexpected_keys[:3]} beside."
        )


def adapters_off(model: Any) -> AbstractContextManager[None]:
    """A context in which the model is the reference policy: without its adapters."""
    disabled: AbstractContextManager[None] = model.disable_adapter()
    return disabled


class MergedWeights:
    """The weights of an adapted model for engines without adapters: merged, under the base model's names."""

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        """Find weights and adapters of ``model``, which ``add_adapters`` made."""
        names = [name for name, _ in every_name(model)]
        self._model = model
        self._scale = config.lora_alpha / config.lora_rank
        self._weights = {_plain(name): name for name in names if ".lora_" not in name}
        self._adapters: dict[str, tuple[str, str]] = {}
        for name in names:
            owner, is_first_factor, _ = name.partition(f".lora_A.{_ADAPTER}.")
            if is_first_factor:
                self._adapters[_plain(f"{owner}.weight")] = (name, name.replace(".lora_A.", ".lora_B."))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape, in the model's order."""
        shapes = ModelWeights(self._model).shapes()
        return {plain: shapes[name] for plain, name in self._weights.items()}

    def gather(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """Whole weights, ``W + lora_alpha / lora_rank * B @ A`` in fp32 where they have adapters;
        collective."""
        adapted = [name for name in names if name in self._adapters]
        # Each rank merges the rows of its shard, for which it needs all of A; the gathering rounds them once.
        factors_a = gather_full_tensors(
            [self._model.get_parameter(self._adapters[name][0]) for name in adapted], torch.float32
        )
        merged = {name: self._merged(name, full_a) for name, full_a in zip(adapted, factors_a, strict=True)}
        parameters = [merged.get(name, self._model.get_parameter(self._weights[name])) for name in names]
        return gather_full_tensors(parameters, dtype)

    def constant(self) -> frozenset[str]:
        """No names: an engine loads all weights of a layer together."""
        return frozenset()

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Weights with adapters, merged."""
        for name, (factor_a, _) in self._adapters.items():
            (full_a,) = gather_full_tensors([self._model.get_parameter(factor_a)], torch.float32)
            yield name, own_rows(self._merged(name, full_a))

    def _merged(self, name: str, factor_a: Tensor) -> Tensor:
        """``W + lora_alpha / lora_rank * B @ A`` in fp32, on this rank's rows, with the full factor A."""
        weight, factor_b = (
            self._model.get_parameter(parameter)
            for parameter in (self._weights[name], self._adapters[name][1])
        )
        return add_product(weight, factor_b, factor_a, self._scale)


class AdapterWeights(MergedWeights):
    """The weights of an adapted model for engines that apply adapters: the base model's, and the factors of
    the adapters, B multiplied by the scale."""

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        """Find weights and adapters of ``model``, which ``add_adapters`` made."""
        super().__init__(model, config)
        self._factors = {
            weight.removesuffix(".weight") + factor: name
            for weight, pair in self._adapters.items()
            for factor, name in zip(FACTORS, pair, strict=True)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's and factor's name and shape, weights first."""
        shapes = ModelWeights(self._model).shapes()
        return super().shapes() | {plain: shapes[name] for plain, name in self._factors.items()}

    def gather(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """Whole weights and factors; collective."""
        return gather_full_tensors([self._engine_tensor(name) for name in names], dtype)

    def constant(self) -> frozenset[str]:
        """The base's weights."""
        return frozenset(self._weights)

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """The factors."""
        for name in self._factors:
            yield name, own_rows(self._engine_tensor(name))

    def _engine_tensor(self, name: str) -> Tensor:
        """A parameter as engines get it; B in float32, so that it is rounded once, when it is gathered."""
        if name not in self._factors:
            return self._model.get_parameter(self._weights[name])
        factor = self._model.get_parameter(self._factors[name])
        return factor.detach().float() * self._scale if name.endswith(FACTORS[1]) else factor


def engine_weights(model: nn.Module, config: ModelConfig) -> WeightSource:
    """The weights of the actor as its engines know them."""
    if config.lora_rank == 0:
        return ModelWeights(model)
    return AdapterWeights(model, config) if config.adapter_rank else MergedWeights(model, config)


def linear_weights(model: Any) -> frozenset[str]:
    """Engine names of the weights of linear layers and experts, without the output layer."""
    head = model.get_output_embeddings()
    linear = {
        f"{name}.weight"
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    }
    experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    return frozenset(_plain(name) for name in linear | experts)


def _plain(name: str) -> str:
    """A parameter's name without the layers that PEFT adds."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
