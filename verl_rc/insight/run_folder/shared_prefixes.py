"""Tokens behind equal prefixes. They come from one distribution, so a temperature shows without entropies.

At another temperature ``l = kappa log pi + c``, where c depends on the prefix alone. A filter, or a banned
token, makes l the same for all tokens behind a prefix: the slope is 0.
"""

from collections.abc import Iterator

import numpy as np

from verl_rc.insight.run_folder.signature_sums import ComparedTokens, summed
from verl_rc.metrics.bounds import BOUNDS
from verl_rc.records.token_records.token_record import Array, prompt_numbers


def prefix_metrics(tokens: ComparedTokens) -> dict[str, float]:
    """Metrics of l behind equal prefixes; empty where ids are not known, or too few tokens share a prefix.

    ``prefix_slope``: slope of l over log pi; ``prefix_z``: the slope over its standard error; ``prefix_r2``:
    the share of the variance of l behind a prefix that the slope explains; ``prefix_spread``: that variance
    over the mean of l^2.
    """
    products, squares = np.zeros((2, len(tokens.record.lengths)))
    spread, square, count, freedom = 0.0, 0.0, 0, 0
    for places, classes, prompts in _shared(tokens):
        square += float(np.sum(tokens.log_ratios[places] ** 2))
        count += len(places)
        log_ratios, log_probs = (
            _centred(values[places], classes) for values in (tokens.log_ratios, tokens.old_log_probs)
        )
        products += np.bincount(prompts, log_ratios * log_probs, len(products))
        squares += np.bincount(prompts, log_probs**2, len(squares))
        spread += float(log_ratios @ log_ratios)
        freedom += len(classes) - len(np.unique(classes))
    quotient = summed(products, squares)
    if freedom < BOUNDS.fewest_shared or not quotient.b or not spread:
        return {}
    z = quotient.z
    metrics = {
        "prefix_slope": quotient.value,
        "prefix_r2": quotient.a**2 / (quotient.b * spread),
        "prefix_spread": spread / freedom / (square / count),
    }
    return metrics if z is None else metrics | {"prefix_z": z}


def behind_prefixes(tokens: ComparedTokens, *columns: Array) -> tuple[Array, ...]:
    """Each column ``[tokens]`` less its mean behind the prefix, of the tokens whose prefix others share; then
    the number of the prompt of each of these tokens."""
    parts = [(*(np.zeros(0) for _ in columns), np.zeros(0, int))]
    for places, classes, prompts in _shared(tokens):
        parts.append((*(_centred(values[places], classes) for values in columns), prompts))
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def _shared(tokens: ComparedTokens) -> Iterator[tuple[Array, Array, Array]]:
    """Yield for each position the places of the compared tokens whose prefix others share, and for each of
    them the number of its prefix and of its prompt; nothing where ids are not known."""
    record = tokens.record
    if record.prompts is None or "response_ids" not in record.tokens:
        return
    prompts = prompt_numbers(record.prompts)
    ids, starts = record.tokens["response_ids"], record.starts
    classes, rows = prompts, np.arange(len(record.lengths))
    position = 0
    while True:
        is_long = record.lengths[rows] > position
        rows, classes = _where_shared(rows[is_long], classes[is_long])
        if not len(rows):
            return
        places = starts[rows] + position
        # The rows that share a prefix may be worst rows, which are not compared.
        is_compared = tokens.is_compared[places]
        compared, prefixes = _where_shared(places[is_compared], classes[is_compared])
        yield compared, prefixes, prompts[tokens.row_numbers[compared]]
        classes = classes * (1 << 32) + ids[places]
        position += 1


def _where_shared(values: Array, classes: Array) -> tuple[Array, Array]:
    """The ``values`` whose class occurs more than once, and their classes, numbered from 0."""
    _, numbers, counts = np.unique(classes, return_inverse=True, return_counts=True)
    is_shared = counts[numbers] > 1
    return values[is_shared], numbers[is_shared]


def _centred(values: Array, classes: Array) -> Array:
    """Values less the mean of their class."""
    counts = np.maximum(np.bincount(classes), 1)
    centred: Array = values - (np.bincount(classes, values) / counts)[classes]
    return centred
