"""What is asked of an engine: how it is built, sampling parameters, and a seed for every request."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_rc.config.rollout import RolloutConfig, ValKwargsConfig


@dataclass(frozen=True)
class EngineOptions:
    """How the engine is built."""

    model_path: str
    dtype: str
    max_model_len: int
    """Tokens of prompt and response together."""
    response_width: int
    """Padded width R of returned responses, tokens."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of ``vllm.LLM``."""


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn; the same for every request of one call."""

    temperature: float
    """Logits are divided by it; 0 is greedy."""
    top_p: float
    top_k: int
    """-1: all tokens."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = False

    @classmethod
    def for_training(cls, rollout: RolloutConfig, stop_token_ids: tuple[int, ...]) -> "SamplingOptions":
        """Options of training rollouts."""
        assert rollout.response_length is not None
        return cls(rollout.temperature, rollout.top_p, rollout.top_k, rollout.response_length, stop_token_ids, rollout.ignore_eos)

    @classmethod
    def for_validation(cls, validation: ValKwargsConfig, max_tokens: int, stop_token_ids: tuple[int, ...]) -> "SamplingOptions":
        """Options of validation rollouts; ``do_sample=False`` is greedy at any temperature."""
        temperature = 0.0 if validation.do_sample is False else validation.temperature
        return cls(temperature, validation.top_p, validation.top_k, max_tokens, stop_token_ids)


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample."""

    prompt_token_ids: list[int]
    seed: int
    max_tokens: int | None = None
    """Limit of the response, tokens; None: that of the sampling options."""


def request_seed(identity: Mapping[str, int]) -> int:
    """A 63-bit seed that depends on every entry of ``identity`` (run seed, step, epoch, row, sample) and on nothing
    else.

    So a sample does not depend on which engine draws it, in which batch, or after which restart.
    """
    # Sorted, and hashed by blake2b: hash() of a string differs from process to process. Shifted, so
    # that it fits a signed 64-bit integer.
    text = ",".join(f"{name}={identity[name]}" for name in sorted(identity))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
