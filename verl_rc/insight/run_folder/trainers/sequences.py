"""Sequences of prompt and response in one list, as most trainers keep them, cut into a row."""

from collections.abc import Mapping
from typing import Any

from verl_rc.data.token_record import DamagedRecordError


def behind_the_prompt(sequence: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of tokens behind the prompt, which ends before the first sampled token; None where none was
    sampled.

    ``sequence``: lists over prompt and response by our names; ``response_mask`` says what was sampled.
    """
    mask = sequence.get("response_mask")
    if not isinstance(mask, list):
        raise DamagedRecordError("every row must have a mask of the sampled tokens")
    start = next((place for place, is_sampled in enumerate(mask) if is_sampled), None)
    if start is None:
        return None
    for name, values in sequence.items():
        if isinstance(values, list) and len(values) != len(mask):
            raise DamagedRecordError(
                f"every field of tokens must have one value a token; response_mask has {len(mask):,}, {name} "
                f"{len(values):,}"
            )
    row = {name: values[start:] if isinstance(values, list) else values for name, values in sequence.items()}
    ids = sequence.get("response_ids")
    return row | ({"prompt_ids": ids[:start]} if isinstance(ids, list) else {})
