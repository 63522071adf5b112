"""Resumable batch samplers: row numbers of one or several files, reshuffled in every epoch."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler


class EpochBatches(Sampler[list[int]]):
    """Batches of row numbers over epochs; each iteration yields the rest of one epoch.

    The order depends only on ``seed`` and the epoch. Rows that do not fill a last batch are dropped in that epoch.
    The epoch advances together with its last batch, so a state taken there continues with the next epoch.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, shuffle: bool) -> None:
        """``shuffle=False`` keeps the order of the rows. Raises ``ValueError`` when no batch can be filled."""
        if num_rows < batch_size:
            raise ValueError(f"an epoch must fill at least one batch of {batch_size} rows, got {num_rows} rows.")
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self.epoch = 0
        """Epoch of the next batch, from 0."""
        self.position = 0
        """Batches of that epoch that were already yielded."""

    def __len__(self) -> int:
        """Batches of one epoch."""
        return self._num_rows // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rest of the current epoch."""
        serving = self.epoch
        order = self._order(serving)
        while self.epoch == serving:
            start = self.position * self._batch_size
            self.position += 1
            if self.position == len(self):
                self.epoch, self.position = serving + 1, 0
            yield order[start : start + self._batch_size]

    def state_dict(self) -> dict[str, int | bool | str]:
        """The position of the next batch, and the values that determine the order."""
        return {**self._identity(), "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int | bool | str]) -> None:
        """Continue from a ``state_dict``. Raises ``ValueError`` when it belongs to other data or another order."""
        identity = self._identity()
        saved = {name: state.get(name) for name in identity}
        if saved != identity:
            raise ValueError(
                f"a resumed run must read the data it was started with: the saved state has {saved}, now it is "
                f"{identity}. Restore data.train_files, data.train_weights, data.train_batch_size, data.shuffle and "
                "data.seed, or start a new run."
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, int | bool | str]:
        return {
            "num_rows": self._num_rows,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_rows))
        return self._permutation(self._num_rows, epoch)

    def _permutation(self, num_rows: int, *identity: int) -> list[int]:
        # SeedSequence takes no negative numbers; the sign is an entry of its own.
        entropy = [abs(self._seed), int(self._seed < 0), *identity]
        order: list[int] = np.random.default_rng(entropy).permutation(num_rows).tolist()
        return order


class MixedBatches(EpochBatches):
    """Batches in which every file has its share of the rows, over epochs; resumable.

    An epoch has as many rows as the files together. A file with more than its natural share is repeated in a new order; a file
    with less continues in the next epoch where it stopped.
    """

    def __init__(self, file_sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int, shuffle: bool) -> None:
        """``file_sizes``: rows of each file, in the order of concatenation; ``weights``: their shares, in any unit.

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
        """The rows of a file in ``epoch``: a slice of an infinite sequence of permutations of its rows."""
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
