"""What vLLM says of a request that has ended or was cut, as parts of a response."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.outputs import CompletionOutput

from verl_rc.data.parts import UNKNOWN, Part
from verl_rc.data.ragged_column import RaggedColumn


def parts_of_output(
    output: CompletionOutput,
    held: tuple[int, int],
    number: int,
    columns: Mapping[str, RaggedColumn] | None = None,
) -> list[Part]:
    """A part for each version of the weights.

    Args:
        output: What one request sampled, or no token yet; spans of tokens, each with the label of the weights
            that sampled it.
        held: Versions of the weights that the engine held when the request began and at its end.
        number: That of the sample, for messages.
        columns: What is recorded beside the tokens.

    Raises:
        ValueError: A token has no log-prob.
        RuntimeError: vLLM says that other weights sampled a token.
    """
    count = len(output.token_ids)
    if not count:
        return []
    spans = output.weight_versions or ()
    # Before the first update vLLM's version is the word "default".
    versions = [int(span.version) if span.version.isdigit() else UNKNOWN for span in spans]
    borders = [(span.start, span.end) for span in spans]
    first, last = held
    whole = [start for start, _ in borders] + [count] == [0, *(end for _, end in borders)]
    if not whole or versions != sorted(set(versions)) or versions[0] < first or versions[-1] != last:
        raise RuntimeError(
            f"the tokens of request {number} must come from versions {first} to {last} of the weights, which "
            f"the engine held, the last from {last}, but vLLM says that they come from {versions}, by the "
            f"spans {borders} of {count} tokens: an update or its version went astray."
        )
    token_ids = torch.tensor(output.token_ids, dtype=torch.int32)
    log_probs = torch.tensor(sampled_log_probs(output, number), dtype=torch.float32)
    return [
        Part(
            token_ids[start:end],
            log_probs[start:end],
            version,
            {name: column[start:end] for name, column in (columns or {}).items()},
        )
        for version, (start, end) in zip(versions, borders, strict=True)
    ]


def sampled_log_probs(output: CompletionOutput, number: int) -> list[float]:
    """The log-prob of every sampled token, in nats; ``ValueError`` when one is missing or belongs to another
    token."""
    flat = output.logprobs
    count = len(output.token_ids)
    if flat is None or len(flat) != count:
        num_returned = "none" if flat is None else str(len(flat))
        raise ValueError(
            f"every one of the {count} tokens of request {number} needs a log-prob, the engine returned "
            f"{num_returned}."
        )
    first = flat.start_indices
    if [flat.token_ids[start] for start in first] != list(output.token_ids):
        raise ValueError(
            f"the log-probs of request {number} must belong to its sampled tokens, the engine returned "
            "others."
        )
    return [flat.logprobs[start] for start in first]


def expert_lists(routes: Any, num_places: int, num_tokens: int, number: int) -> RaggedColumn:
    """The experts beside each sampled token of a request: those of all layers, at each place of the context
    that has none yet, up to the place that the token was sampled at.

    Args:
        routes: uint8 ``[num_places + num_tokens - 1, layers, experts of a token]``, as vLLM returns it: of
            places of the context in order, then of the sampled tokens but the last, which no pass has seen.
        num_places: Places of the context whose experts are not recorded beside tokens before, at least 1.
        num_tokens: Sampled tokens, at least 1.
        number: That of the sample, for messages.

    Raises ``RuntimeError`` when vLLM returned another number of places, or more than 256 experts.
    """
    expected = num_places + num_tokens - 1
    found = "nothing" if routes is None else f"{routes.dtype} of shape {list(routes.shape)}"
    if routes is None or len(routes) != expected or routes.dtype != np.uint8:
        raise RuntimeError(
            f"the experts at {expected} places of request {number} must come with its {num_tokens} tokens, "
            f"as uint8, the engine returned {found}: the trainer cannot replay them. Drop "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay."
        )
    places = np.ones(num_tokens, dtype=np.int64)
    places[0] = num_places
    return RaggedColumn.from_counts(places * routes[0].size, routes.reshape(-1))
