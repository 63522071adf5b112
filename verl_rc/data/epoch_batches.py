"""The order in which rows are served: batches of row numbers, new in every epoch, that resume exactly."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class EpochBatches(Sampler[list[int]]):
    """Batches of row numbers, epoch after epoch; each pass over it serves the rest of one epoch.

    The order depends on ``seed`` and the epoch alone. Rows that do not fill a last batch are left out of that epoch.
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
        """Batches of that epoch already served."""

    def __len__(self) -> int:
        """Batches of one epoch."""
        return self._num_rows // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """Serve the rest of the current epoch."""
        serving = self.epoch
        order = self._order(serving)
        while self.epoch == serving:
            start = self.position * self._batch_size
            self.position += 1
            if self.position == len(self):
                self.epoch, self.position = serving + 1, 0
            yield order[start : start + self._batch_size]

    def state_dict(self) -> dict[str, int | bool | str]:
        """Where the next batch comes from, and what the order depends on."""
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
