"""Requests to an engine, their sampling options and seeds, and the options of conversations."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_rc.config.rollout import RolloutConfig, ValKwargsConfig
from verl_rc.records.episode import Episode
from verl_rc.records.parts import Answer, Part, Sample, last_turn, num_answers, num_tokens
from verl_rc.records.pictures import Pictures


@dataclass(frozen=True)
class ConversationOptions:
    """Options of an engine whose samples converse with an environment or tools."""

    rollout: RolloutConfig
    """The section whose ``environment`` or ``multi_turn`` tools answer the turns."""
    tokenizer_path: str
    trust_remote_code: bool
    chat_template_kwargs: Mapping[str, Any]
    """``data.apply_chat_template_kwargs``."""
    hosts: Any = None
    """``environment_host.Hosts`` in other processes. None means one in this process."""


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options of all requests of one call."""

    temperature: float
    """Divisor of the logits; 0 means greedy."""
    top_p: float
    top_k: int
    """-1: all tokens."""
    max_tokens: int
    """Limit of a response, tokens."""
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = False
    min_p: float = 0.0
    max_support: int = 0
    """Size of the largest support that is reported with a sampled token; 0 means that none is."""
    records_experts: bool = False
    """Whether the experts of each token are reported with it."""
    head_tokens: int = 0
    """Most likely tokens that are reported with each sampled one, with their log-probs. 0 if none are."""

    @classmethod
    def for_training(
        cls,
        rollout: RolloutConfig,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        head_tokens: int = 0,
    ) -> "SamplingOptions":
        """Options of training rollouts."""
        return cls(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            max_tokens,
            stop_token_ids,
            rollout.ignore_eos,
            rollout.min_p,
            rollout.largest_support,
            rollout.enable_rollout_routing_replay,
            head_tokens,
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
    """Limit of the whole response, tokens. None means that of the sampling options."""
    so_far: Sample = field(default_factory=lambda: Sample(0))
    """The partial response that this request continues; its number has no meaning."""
    episode: Episode | None = None
    """The episode whose environment answers the turns. None if there is no environment."""
    pictures: Pictures | None = None
    """Those of the prompt, whose placeholders it has. None if it has none."""

    def limit(self, options: SamplingOptions) -> int:
        """Limit of the whole response, tokens, including those of the environment."""
        return options.max_tokens if self.max_tokens is None else self.max_tokens


def request_seed(identity: Mapping[str, int]) -> int:
    """A 63-bit seed that depends on all entries of ``identity`` (run seed, step, epoch, row, sample) alone.

    So on a CPU a sample does not depend on its engine, its batch or a restart. On a GPU the last bits of a
    probability depend on the batch, unless vLLM runs with ``VLLM_BATCH_INVARIANT=1``.
    """
    # blake2b, because hash() of a string differs between processes; shifted into a signed 64-bit integer.
    text = ",".join(f"{name}={identity[name]}" for name in sorted(identity))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def next_seed(first: int, parts: Sequence[Part | Answer]) -> int:
    """The seed of the request that continues ``parts``; ``first`` is the seed of the first request.

    So a part is the same on every engine, and two parts of a response share no random numbers.
    """
    return part_seed(turn_seed(first, num_answers(parts)), num_tokens(last_turn(parts)))


def turn_seed(first: int, turn: int) -> int:
    """The seed of a conversation's turn, counted from 0; ``first`` is the seed of turn 0."""
    return first if turn == 0 else request_seed({"sample": first, "turn": turn})


def part_seed(first: int, offset: int) -> int:
    """The seed of a turn's part that begins at token ``offset``; ``first`` is the seed of the part at 0."""
    return first if offset == 0 else request_seed({"seed": first, "offset": offset})
