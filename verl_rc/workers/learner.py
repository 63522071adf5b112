"""What the ranks of actor and critic have in common: they write their models down, take them up again, and leave."""

from pathlib import Path

from verl_rc.distributed.process_group import leave_trainer_group
from verl_rc.workers.sharded_model import ShardedModel


class Learner:
    """One rank of a model that learns."""

    model: ShardedModel
    """Weights, moments and schedule."""

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint, or with ``checkpoint.async_save`` begin to; collective."""
        self.model.save(folder)

    def has_saved(self, wait: bool) -> bool:
        """Whether the last checkpoint is written; ``wait`` until it is. Raises ``CheckpointError`` when it cannot be."""
        return self.model.has_saved(wait)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint; collective."""
        self.model.load(folder)

    def close(self) -> None:
        """Leave the process groups."""
        leave_trainer_group()
