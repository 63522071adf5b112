"""Tokens with the same tokens before them: they were drawn from one distribution, so that a temperature shows
without its entropy.

At another temperature ``l = kappa log pi + c``, where c depends on the tokens before alone. A filter, or a
banned token, makes l the same for all tokens behind a prefix: the slope is 0.
"""

from collections.abc import Iterator

import numpy as np

from verl_rc.data.token_record import Array, prompt_numbers
from verl_rc.insight.run_folder.signature_sums import ComparedTokens, summed
from verl_rc.metrics.bounds import BOUNDS


def prefix_metrics(tokens: ComparedTokens) -> dict[str, float]:
    """Slope of l over log pi behind equal prefixes, in standard errors too, and the share of the spread of l
    that it explains; how much l varies behind a prefix, of the mean of l^2. Empty where ids are not known, or
    too few tokens share a prefix."""
    products, squares = np.zeros((2, len(tokens.record.lengths)))
    spread, square, count, freedom = 0.0, 0.0, 0, 0
    for places, classes, prompts in _shared(tokens):
        square += float(np.sum(tokens.logs[places] ** 2))
        count += len(places)
        logs, train = (_centred(values[places], classes) for values in (tokens.logs, tokens.train))
        products += np.bincount(prompts, logs * train, len(products))
        squares += np.bincount(prompts, train**2, len(squares))
        spread += float(logs @ logs)
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
    """Of each column ``[tokens]`` the values less the mean behind their prefix, where others share it; last
    the number of each one's prompt."""
    parts = [(*(np.zeros(0) for _ in columns), np.zeros(0, int))]
    for places, classes, prompts in _shared(tokens):
        parts.append((*(_centred(values[places], classes) for values in columns), prompts))
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def _shared(tokens: ComparedTokens) -> Iterator[tuple[Array, Array, Array]]:
    """Yield for each position the compared tokens whose prefix others share, and the numbers of each one's
    prefix and prompt; nothing where ids are not known."""
    record = tokens.record
    if record.prompts is None or "response_ids" not in record.tokens:
        return
    prompts = prompt_numbers(record.prompts)
    ids, starts = record.tokens["response_ids"], record.starts
    classes, rows = prompts, np.arange(len(record.lengths))
    position = 0
    while True:
        is_long = record.lengths[rows] > position
        rows, classes = _of_shared(rows[is_long], classes[is_long])
        if not len(rows):
            return
        places = starts[rows] + position
        # Again: those that share the prefix may be worst rows, which are not compared.
        is_compared = tokens.valid[places]
        compared, prefixes = _of_shared(places[is_compared], classes[is_compared])
        yield compared, prefixes, prompts[tokens.rows[compared]]
        classes = classes * (1 << 32) + ids[places]
        position += 1


def _of_shared(values: Array, classes: Array) -> tuple[Array, Array]:
    """Those of ``values`` whose class others have too, and the classes numbered from 0."""
    _, numbers, counts = np.unique(classes, return_inverse=True, return_counts=True)
    is_shared = counts[numbers] > 1
    return values[is_shared], numbers[is_shared]


def _centred(values: Array, classes: Array) -> Array:
    """Values less the mean of their class."""
    counts = np.maximum(np.bincount(classes), 1)
    centred: Array = values - (np.bincount(classes, values) / counts)[classes]
    return centred
