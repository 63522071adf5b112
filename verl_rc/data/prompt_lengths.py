"""How long the prompts are, in one line, before the first of them is used."""

from collections.abc import Sequence


def describe_lengths(lengths: Sequence[int], num_prompts: int, limit: int) -> str:
    """A line with the histogram of prompt lengths (tokens, before truncation) against ``data.max_prompt_length``.

    ``lengths`` may be those of a sample of ``num_prompts`` prompts. Bins double: 1, 2-3, 4-7, 8-15 tokens and so on.
    """
    ordered = sorted(lengths)
    bins: dict[int, int] = {}
    for length in ordered:
        exponent = length.bit_length()
        bins[exponent] = bins.get(exponent, 0) + 1
    shares = ", ".join(f"{_bin_name(exponent)}: {count / len(ordered):.0%}" for exponent, count in bins.items())
    longer = sum(length > limit for length in ordered)
    counted = f"{num_prompts}" if len(ordered) == num_prompts else f"{len(ordered)} of {num_prompts}"
    return (
        f"{counted} prompts by tokens: {shares}; median {ordered[(len(ordered) - 1) // 2]}, longest {ordered[-1]}, "
        f"data.max_prompt_length={limit}, longer {longer / len(ordered):.1%}"
    )


def _bin_name(exponent: int) -> str:
    first, last = (1 << exponent) >> 1, (1 << exponent) - 1
    return str(first) if first == last else f"{first}-{last}"


def evenly_spread(count: int, at_most: int) -> list[int]:
    """Up to ``at_most`` of the numbers from 0 to ``count - 1``, the first and evenly spread others."""
    return list(range(0, count, -(-count // at_most)))
