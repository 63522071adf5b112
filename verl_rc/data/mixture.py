"""The order in which rows of several files are served when each file has a weight."""

from collections.abc import Sequence

import numpy as np

from verl_rc.data.epoch_batches import EpochBatches


class MixedBatches(EpochBatches):
    """Batches in which every file has its share of the rows, epoch after epoch; they resume exactly.

    An epoch serves as many rows as the files hold, though not each of them once: a file with more than its natural share
    is passed through again, in a new order each time, and a file with less goes on in the next epoch where it stopped.
    """

    def __init__(self, file_sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int, shuffle: bool) -> None:
        """``file_sizes``: rows of each file, which follow each other; ``weights``: their shares, in any unit.

        ``shuffle=False`` keeps the order of each file's rows. Raises ``ValueError`` when no batch can be filled, or a file
        has no row.
        """
        super().__init__(sum(file_sizes), batch_size, seed, shuffle)
        if min(file_sizes) < 1:
            raise ValueError(
                "every file with a weight in data.train_weights must have at least one row left after data.train_max_samples "
                f"and filtering, got {list(file_sizes)} rows. Remove the file, or loosen the filter."
            )
        self._file_sizes = list(file_sizes)
        self._weights = list(weights)
        self._files = interleave(weights, len(self) * batch_size)
        self._rows_per_epoch = [self._files.count(file) for file in range(len(self._file_sizes))]

    def _identity(self) -> dict[str, int | bool | str]:
        mixture = ",".join(f"{size}*{weight!r}" for size, weight in zip(self._file_sizes, self._weights, strict=True))
        return {**super()._identity(), "mixture": mixture}

    def _order(self, epoch: int) -> list[int]:
        first_rows = np.cumsum([0, *self._file_sizes])
        upcoming = [iter(self._rows_of(file, epoch)) for file in range(len(self._file_sizes))]
        return [int(first_rows[file]) + next(upcoming[file]) for file in self._files]

    def _rows_of(self, file: int, epoch: int) -> list[int]:
        """What ``epoch`` serves of a file: a stretch of its endless passes, each a permutation of its rows."""
        size, count = self._file_sizes[file], self._rows_per_epoch[file]
        first = epoch * count
        passes = range(first // size, (first + count - 1) // size + 1)
        rows = [row for number in passes for row in self._pass(file, number)]
        return rows[first % size : first % size + count]

    def _pass(self, file: int, number: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._file_sizes[file]))
        return self._permutation(self._file_sizes[file], file, number)


def interleave(weights: Sequence[float], count: int) -> list[int]:
    """``count`` file numbers, spread as evenly as ``weights`` (positive, in any unit) allow: the file that is furthest
    behind its share comes next, the first of several.
    """
    shares = [weight / sum(weights) for weight in weights]
    served = [0] * len(shares)
    order = []
    for position in range(1, count + 1):
        behind = [position * share - done for share, done in zip(shares, served, strict=True)]
        file = behind.index(max(behind))
        served[file] += 1
        order.append(file)
    return order
