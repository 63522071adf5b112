"""Gradients of the trainer's model for recorded rows, with the weights of their step: ``what-if
--gradients``."""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from verl_rc.insight.replay.rows import NothingToReplayError, read_rows
from verl_rc.insight.replay.trainer import TrainerReplay
from verl_rc.insight.replay.weights import KeptWeights, config_of
from verl_rc.insight.run_folder.records import LARGEST_STEP
from verl_rc.insight.what_if import RecordedBatch, read_batch

PROJECTED = 16_384
"""Size of a projected gradient. A squared norm, or a product of gradients, then has an error of about
sqrt(2 / PROJECTED), which is 1 % of the product of the norms."""
_AT_ONCE = 1 << 24


class ParameterGradients:
    """Computes the updates of blocks of prompts for ``estimate_presets``.

    One random projection shortens every gradient, because a whole gradient for each prompt and preset would
    fill the memory. The projection is linear, so it gives differences, norms and angles.
    """

    def __init__(
        self, folder: Path, first_step: int = 0, last_step: int = LARGEST_STEP, projected: int = PROJECTED
    ) -> None:
        """Find the records whose weights are on the disk. Raises ``NothingToReplayError`` without any."""
        self._config = config_of(folder)
        self._scratch = tempfile.TemporaryDirectory()
        self._kept = KeptWeights(self._config, folder, Path(self._scratch.name))
        rows = read_rows(folder, sys.maxsize, first_step, last_step)
        self._rows = [record for record in rows if record.trainer_version in self._kept.versions]
        if not self._rows:
            raise NothingToReplayError(
                f"{folder} must have a token record whose weights are on the disk: trainer.save_freq keeps "
                "weights, and the step after a checkpoint is recorded."
            )
        self.batch: RecordedBatch = read_batch(
            folder, first_step, last_step, {record.step for record in self._rows}
        )
        self._projected = projected
        self._passes, self._seconds, self._parameters = 0, 0.0, 0

    def __call__(
        self, batch: RecordedBatch, pulls: Sequence[Tensor], blocks: Tensor, count: int
    ) -> list[Tensor]:
        """Of each of ``pulls`` ``[B, T]``, float64 ``[count, D]``: the update of every block of prompts,
        projected."""
        began = time.monotonic()
        distinct, place_of_pull = _distinct(pulls)
        updates: list[dict[int, Tensor]] = [{} for _ in distinct]
        steps = torch.tensor(batch.step_of_row)
        for rows in self._rows:
            row_indices = (steps == rows.step).nonzero()[:, 0]
            model = TrainerReplay(self._config, self._kept.folder(rows.trainer_version), torch.float32)
            tokens = rows.tokens[: len(row_indices)]  # random rows come first, in the same order
            for block in blocks[row_indices].unique().tolist():
                inside = blocks[row_indices] == block
                for update, pull in zip(updates, distinct, strict=True):
                    gradient = self._project(model.gradient(tokens[inside], pull[row_indices][inside]))
                    update[block] = update[block] + gradient if block in update else gradient
                    self._passes += 1
        stacked = [torch.stack([update[block] for block in range(count)]) for update in updates]
        self._seconds += time.monotonic() - began
        return [stacked[place] for place in place_of_pull]

    @property
    def cost(self) -> str:
        """What the gradients are of, and their cost, in words."""
        lora = self._config.actor_rollout_ref.model.lora_rank > 0
        steps = ", ".join(str(rows.step) for rows in self._rows)
        return (
            f"Norm, cosine, bias, noise and error are of {self._parameters:,} "
            f"parameters{' with the adapters merged' * lora}, at the weights before steps {steps}: "
            f"{self._passes:,} backward passes, {self._seconds:.0f} s"
            + (
                f"; a random projection to {self._projected:,} numbers is kept of each."
                if self._is_projected
                else "."
            )
        )

    @property
    def _is_projected(self) -> bool:
        return self._parameters > self._projected

    def _project(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """float64 ``[D]``: a short gradient as it is; of a longer one a random projection, which adds its
        numbers with random signs in random places."""
        self._parameters = sum(values.numel() for values in gradient.values())
        if not self._is_projected:
            return torch.cat([values.flatten() for values in gradient.values()]).double()
        generator = torch.Generator().manual_seed(0)
        projected = torch.zeros(self._projected, dtype=torch.float64)
        for values in gradient.values():
            for part in values.flatten().split(_AT_ONCE):
                hashes = torch.randint(2 * self._projected, part.shape, generator=generator)
                projected.index_add_(0, hashes // 2, torch.where(hashes % 2 == 0, part, -part).double())
        return projected


def _distinct(pulls: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The distinct ``pulls``, and the place of each pull among them. Presets often agree on a batch."""
    contents = [pull.numpy().tobytes() for pull in pulls]
    distinct = dict(zip(contents, pulls, strict=True))
    places = {content: place for place, content in enumerate(distinct)}
    return list(distinct.values()), [places[content] for content in contents]
