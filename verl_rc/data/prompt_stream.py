"""Training prompts batch by batch, epoch after epoch, from a position that can be saved."""

from collections.abc import Iterator
from typing import Any

from verl_rc.data.dataset import PromptRow


class PromptStream:
    """Draws batches from a loader; a pass over the loader is an epoch, and the next one begins by itself."""

    def __init__(self, loader: Any) -> None:
        """``loader``: as ``build_train_loader`` makes one; nobody else may draw from it."""
        self._loader = loader
        self._passing: Iterator[list[PromptRow]] | None = None
        self._batches_drawn = 0

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self._loader)

    def draw(self) -> tuple[int, list[PromptRow]]:
        """The next batch, and its epoch, from 0."""
        while True:
            if self._passing is None:
                self._passing = iter(self._loader)
            rows = next(self._passing, None)
            if rows is not None:
                epoch = self._batches_drawn // len(self)
                self._batches_drawn += 1
                return epoch, rows
            self._passing = None

    def row(self, row_index: int) -> PromptRow:
        """The prompt of one row of the data. Raises ``ValueError`` when the run's choice of rows has none of this index."""
        found: PromptRow = self._loader.dataset.row(row_index)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from: every batch drawn so far is used up."""
        return {"batches_drawn": self._batches_drawn, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict``. Raises ``ValueError`` when it is none, or belongs to other data or another order."""
        if state.keys() != {"batches_drawn", "loader"}:
            raise ValueError(
                f"the data position of a checkpoint must hold batches_drawn and loader, got {sorted(state)}: it was written by "
                "another release. Start anew with trainer.resume_mode=disable."
            )
        self._batches_drawn = int(state["batches_drawn"])
        self._loader.load_state_dict(state["loader"])
