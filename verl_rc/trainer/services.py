"""The handles of a run, which stay the same objects; ``RunState`` holds what changes from step to step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_rc.config.run import RunConfig
from verl_rc.metrics.sinks import Tracker
from verl_rc.records.dataset import PromptRow, PromptStream
from verl_rc.runtime.checkpoint import CheckpointStore
from verl_rc.runtime.weight_sync.proof import GapLimit
from verl_rc.trainer.cluster.engine_group import EngineGroup
from verl_rc.trainer.cluster.model_groups import ActorGroup, CriticGroup, FrozenGroup
from verl_rc.trainer.cluster.placement import Placement
from verl_rc.trainer.cluster.weight_transport import WeightTransport
from verl_rc.trainer.guards import Guards
from verl_rc.trainer.openings import Openings
from verl_rc.trainer.scoring import ResponseScorer
from verl_rc.trainer.step_record import StageFlops
from verl_rc.trainer.stop import StopRequest


@dataclass(frozen=True)
class Services:
    """Handles of processes and files, the configuration, and what follows from it."""

    config: RunConfig
    folder: Path
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    """All tokens at which a response ends, EOS first."""
    prompts: PromptStream
    """Training prompts, batch by batch."""
    openings: Openings | None
    """The environments' openings of episodes. None means that prompts come from the data."""
    validation_rows: list[PromptRow]
    scorer: ResponseScorer
    actor: ActorGroup
    critic: CriticGroup | None
    """The critic. None if nothing needs values."""
    frozen: Mapping[str, FrozenGroup]
    """The policies that only score, with models of their own, by role."""
    engines: EngineGroup
    placement: Placement
    """Numbers of processes, and threads of each."""
    transport: WeightTransport
    """The way of weights from the actor to the engines."""
    checkpoints: CheckpointStore
    flops: Mapping[str, StageFlops]
    """The stages of ``perf/mfu/*``."""
    gap_limit: GapLimit
    """Limits of the difference between log-probs of trainer and engine, on a step's own rollouts and on
    canary tokens."""
    stop: StopRequest
    """Whether the scheduler asked the run to end."""
    tracker: Tracker
    total_steps: int
    block_size: int
    """Tokens of one block of the engines' key-value cache."""

    @property
    def guards(self) -> Guards:
        """The guards of the run's updates."""
        return Guards(self.config.trainer.alerts, self.tracker, self.stop)

    def is_due(self, frequency: int, step: int) -> bool:
        """Whether an action that is due every ``frequency`` steps (<= 0: never) and at the last step is due
        at ``step``."""
        return frequency > 0 and (step % frequency == 0 or step == self.total_steps)

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint of ``step`` is due by ``trainer.save_freq`` (rounded up to steps that publish;
        <= 0: never)."""
        return self.is_due(
            self.config.async_training.rounded_to_publications(self.config.trainer.save_freq), step
        )
