"""Requests to an engine: sampling parameters, what conversations need, and a seed for every request."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_rc.config.rollout import RolloutConfig, ValKwargsConfig
from verl_rc.data.episode import Episode
from verl_rc.data.parts import Answer, Part, Sample, last_turn, num_answers, num_tokens


@dataclass(frozen=True)
class ConversationOptions:
    """What an engine needs to let an environment or tools answer the turns of samples."""

    rollout: RolloutConfig
    """Tools or environment."""
    tokenizer_path: str
    trust_remote_code: bool
    chat_template_kwargs: Mapping[str, Any]
    """``data.apply_chat_template_kwargs``."""
    hosts: Any = None
    """``environment_host.Hosts`` in other processes; None: one in this process."""


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
    min_p: float = 0.0
    max_kept_tokens: int = 0
    """Largest set of tokens left by the filter that is reported with each token; 0: none is."""
    records_experts: bool = False
    """The experts that each token took are reported with it."""

    @classmethod
    def for_training(cls, rollout: RolloutConfig, stop_token_ids: tuple[int, ...]) -> "SamplingOptions":
        """Options of training rollouts."""
        return cls(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.response_length,
            stop_token_ids,
            rollout.ignore_eos,
            rollout.min_p,
            rollout.largest_kept_set,
            rollout.enable_rollout_routing_replay,
        )

    @classmethod
    def for_validation(
        cls, validation: ValKwargsConfig, max_tokens: int, stop_token_ids: tuple[int, ...]
    ) -> "SamplingOptions":
        """Options of validation rollouts; ``do_sample=False`` is greedy at any temperature."""
        temperature = 0.0 if validation.is_greedy else validation.temperature
        return cls(temperature, validation.top_p, validation.top_k, max_tokens, stop_token_ids)


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample."""

    prompt_token_ids: list[int]
    seed: int
    """Seed of the first part; see ``next_seed``."""
    max_tokens: int | None = None
    """Limit of the whole response, tokens; None: that of the sampling options."""
    so_far: Sample = field(default_factory=lambda: Sample(0))
    """What there is of the response already, under whatever number: it continues behind these tokens."""
    episode: Episode | None = None
    """Of the environment that answers its turns; None: there is none."""

    def limit(self, options: SamplingOptions) -> int:
        """Longest response, tokens, with those of the environment."""
        return options.max_tokens if self.max_tokens is None else self.max_tokens


def request_seed(identity: Mapping[str, int]) -> int:
    """A 63-bit seed that depends on every entry of ``identity`` (run seed, step, epoch, row, sample) and on
    nothing else.

    So on a CPU a sample does not depend on which engine draws it, in which batch, or after which restart. On
    a GPU the last bits of a probability depend on the batch, unless vLLM's kernels are told otherwise
    (``VLLM_BATCH_INVARIANT=1``).
    """
    # Sorted, and hashed by blake2b: hash() of a string differs from process to process. Shifted, so
    # that it fits a signed 64-bit integer.
    text = ",".join(f"{name}={identity[name]}" for name in sorted(identity))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def next_seed(first: int, parts: Sequence[Part | Answer]) -> int:
    """The seed of the request that continues a response; ``first`` is that of the response's first one.

    So a part is the same on every engine, and two parts of a response share no random numbers.
    """
    return part_seed(turn_seed(first, num_answers(parts)), num_tokens(last_turn(parts)))


def turn_seed(first: int, turn: int) -> int:
    """The seed of the policy's turn ``turn`` in a conversation, from 0; ``first`` is that of the first
    turn."""
    return first if turn == 0 else request_seed({"sample": first, "turn": turn})


def part_seed(first: int, offset: int) -> int:
    """The seed of the part of a turn that begins at its token ``offset``; ``first`` is that of the turn's
    first part."""
    return first if offset == 0 else request_seed({"seed": first, "offset": offset})
