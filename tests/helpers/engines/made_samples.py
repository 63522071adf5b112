"""Samples as engines return them, made from lists; shared by tests of what happens to them."""

from collections.abc import Sequence

import torch

from verl_rc.records.parts import Answer, Part, Sample


def part(tokens: Sequence[int], version: int, log_probs: Sequence[float] | float = -0.5) -> Part:
    """One number for ``log_probs``: that of every token."""
    numbers = [log_probs] * len(tokens) if isinstance(log_probs, float) else log_probs
    return Part(torch.tensor(tokens, dtype=torch.int32), torch.tensor(numbers, dtype=torch.float32), version)


def answer(tokens: Sequence[int]) -> Answer:
    return Answer(torch.tensor(tokens, dtype=torch.int32))


def sample(
    number: int, tokens: Sequence[int], version: int = 0, log_probs: Sequence[float] | float = 0.0
) -> Sample:
    """Ended by a stop token; all of it sampled by one version of the weights."""
    return Sample(number, [part(tokens, version, log_probs)], finished=True)


def first_tokens(samples: Sequence[Sample]) -> list[int]:
    """Of each sample."""
    return [int(one.parts[0].token_ids[0]) for one in samples]


def of_parts(parts: Sequence[Part | Answer]) -> list[tuple[int, float, int]]:
    """Token, log-prob and version of every position; an answer's have log-prob 0 and version -1."""
    columns = []
    for one in parts:
        zeros = [0.0] * len(one.token_ids)
        numbers = one.log_probs.tolist() if isinstance(one, Part) else zeros
        version = one.version if isinstance(one, Part) else -1
        columns += [
            (token, number, version) for token, number in zip(one.token_ids.tolist(), numbers, strict=True)
        ]
    return columns
