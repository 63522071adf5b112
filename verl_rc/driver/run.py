"""Everything a run consists of once it is set up."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_rc.checkpoint import CheckpointStore
from verl_rc.cluster.engine_group import EngineGroup
from verl_rc.cluster.trainer_groups import ActorGroup, CriticGroup, ReferenceGroup
from verl_rc.cluster.weight_transport import WeightTransport
from verl_rc.config.run import RunConfig
from verl_rc.data.dataset import PromptRow
from verl_rc.data.prompt_stream import PromptStream
from verl_rc.driver.interruption import StopRequest
from verl_rc.driver.scoring import ResponseScorer
from verl_rc.metrics.sinks import Tracker
from verl_rc.ppo.control import Control
from verl_rc.ppo.nonfinite_updates import NonFiniteUpdateGuard
from verl_rc.ppo.reward_watch import RewardWatch
from verl_rc.ppo.skipped_updates import SkippedUpdateGuard
from verl_rc.rollout.agent_loop import AgentLoop
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.proof import GapMonitor


@dataclass
class Progress:
    """How far a run is: what changes from step to step beside models, loader and monitors."""

    step: int
    """Training steps done."""
    control: Control
    """Weight of the KL penalty and rejection threshold in force."""


@dataclass(frozen=True)
class Run:
    """A run's parts. The stages take it whole; nothing in it is replaced while the run lasts."""

    config: RunConfig
    folder: Path
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    prompts: PromptStream
    """Training prompts, batch by batch."""
    validation_rows: list[PromptRow]
    scorer: ResponseScorer
    progress: Progress
    actor: ActorGroup
    critic: CriticGroup | None
    """None: nothing needs values."""
    reference: ReferenceGroup | None
    """None: nothing compares with it, or it is the actor without its LoRA adapters."""
    engines: EngineGroup
    agent_loop: AgentLoop | None
    """The conversation in which the policy calls tools between its turns; None: there are no tools."""
    transport: WeightTransport
    """How weights get from the actor to the engines."""
    checkpoints: CheckpointStore
    manifest: Manifest
    gap_monitor: GapMonitor
    """Watches the gap of every step's own rollouts."""
    canary_monitor: GapMonitor
    """Watches the gap of generated canary tokens."""
    skipped_updates: SkippedUpdateGuard
    """Stops the run when rejection leaves nothing to train on."""
    nonfinite_updates: NonFiniteUpdateGuard
    """Stops the run when gradients stay NaN or infinite."""
    reward_watch: RewardWatch
    """Notices that rewards collapse."""
    stop: StopRequest
    """Whether the scheduler asked the run to end."""
    tracker: Tracker
    total_steps: int
    max_model_len: int
    """Tokens of prompt and response that an engine holds."""
    block_size: int
    """Tokens of one block of the engines' key-value cache."""

    def training_batches(self) -> Iterator[tuple[int, int, list[PromptRow]]]:
        """``(step, epoch, prompts)`` from the step after the last one done to ``total_steps``."""
        while self.progress.step < self.total_steps:
            epoch, rows = self.prompts.draw()
            yield self.progress.step + 1, epoch, rows
            self.progress.step += 1

    def is_due(self, frequency: int, step: int) -> bool:
        """Whether something that happens every ``frequency`` steps (<= 0: never) and at the end happens now."""
        return frequency > 0 and (step % frequency == 0 or step == self.total_steps)
