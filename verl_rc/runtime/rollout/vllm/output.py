"""Parts of a response from vLLM's output of a request that has ended or was cut."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.outputs import CompletionOutput

from verl_rc.records.parts import UNKNOWN, Part
from verl_rc.records.ragged_column import RaggedColumn


def parts_of_output(
    output: CompletionOutput,
    versions_held: tuple[int, int],
    number: int,
    columns: Mapping[str, RaggedColumn] | None = None,
) -> list[Part]:
    """A part for each version of the weights.

    Args:
        output: Tokens of one request, which may be none yet, in spans of one version each.
        versions_held: Versions of the weights that the engine held at the begin and the end of the request.
        number: The number of the request, for messages.
        columns: Columns of the tokens by name, such as the experts.

    Raises:
        ValueError: A token has no log-prob.
        RuntimeError: vLLM reports a version that the engine did not hold.
    """
    count = len(output.token_ids)
    if not count:
        return []
    spans = output.weight_versions or ()
    # Before the first update vLLM's version is "default".
    versions = [int(span.version) if span.version.isdigit() else UNKNOWN for span in spans]
    bounds = [(span.start, span.end) for span in spans]
    first, last = versions_held
    is_contiguous = [start for start, _ in bounds] + [count] == [0, *(end for _, end in bounds)]
    if not is_contiguous or versions != sorted(set(versions)) or versions[0] < first or versions[-1] != last:
        raise RuntimeError(
            f"the tokens of request {number} must come from versions {first} to {last} of the weights, which "
            f"the engine held, the last from {last}, but vLLM reports the versions {versions} for the spans "
            f"{bounds} of {count} tokens: an update or its version was lost."
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
        for version, (start, end) in zip(versions, bounds, strict=True)
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


def expert_lists(routes: Any, num_unrecorded: int, num_tokens: int, number: int) -> RaggedColumn:
    """The experts of each sampled token's column: those of all layers, at each position that no earlier
    column has, up to the position before the token.

    Args:
        routes: uint8 ``[num_unrecorded + num_tokens - 1, layers, experts per token]``, as vLLM returns it: of
            positions of the context in order, then of the sampled tokens without the last, which no forward
            pass has read.
        num_unrecorded: Positions of the context that no earlier column has, at least 1.
        num_tokens: Sampled tokens, at least 1.
        number: The number of the request, for messages.

    Raises ``RuntimeError`` when vLLM returned another number of positions, or more than 256 experts.
    """
    expected = num_unrecorded + num_tokens - 1
    returned = "nothing" if routes is None else f"{routes.dtype} of shape {list(routes.shape)}"
    if routes is None or len(routes) != expected or routes.dtype != np.uint8:
        raise RuntimeError(
            f"the experts at {expected} positions of request {number} must come with its {num_tokens} "
            f"tokens, as uint8, the engine returned {returned}: the trainer cannot replay them. Drop "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay."
        )
    counts = np.ones(num_tokens, dtype=np.int64)
    counts[0] = num_unrecorded
    return RaggedColumn.from_counts(counts * routes[0].size, routes.reshape(-1))
