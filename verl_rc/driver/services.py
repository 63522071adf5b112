"""The parts of a run that stay what they are while it lasts, and the request to end it; what changes is
``RunState``."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from verl_rc.checkpoint import CheckpointStore
from verl_rc.cluster.engine_group import EngineGroup
from verl_rc.cluster.model_groups import ActorGroup, CriticGroup, ReferenceGroup
from verl_rc.cluster.placement import Placement
from verl_rc.cluster.weight_transport import WeightTransport
from verl_rc.config.run import RunConfig
from verl_rc.data.dataset import PromptRow, PromptStream
from verl_rc.driver.announce import say
from verl_rc.driver.scoring import ResponseScorer
from verl_rc.metrics.sinks import Tracker
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.proof import GapLimit

TERMINATED = 143
"""Exit code of a run that was asked to end: 128 + SIGTERM."""


class StoppedByAlertError(RuntimeError):
    """An alert ended the run; a checkpoint was written."""


class StopRequest:
    """Whether SIGTERM came, or the run itself wants to end.

    The first SIGTERM is taken note of; a second one ends the process where it stands.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether the run is to end, after a step that is saved."""
        self.ending = False
        """Whether it ends after this step."""
        self._signalled = False
        self.reason: str | None = None
        """Why this run itself asks to end; None: the scheduler does."""

    def decide(self) -> bool:
        """Decide whether the run ends after this step: the request may come after the moment in which the
        step could be saved."""
        self.ending = self.requested
        return self.ending

    def end_if_decided(self) -> None:
        """End the run if that is wanted: ``StoppedByAlertError`` when it is the run itself that wants to,
        else ``SystemExit``."""
        if not self.ending:
            return
        if self.reason is not None:
            raise StoppedByAlertError(self.reason)
        raise SystemExit(TERMINATED)

    def request(self, reason: str) -> None:
        """End the run after this step, saved."""
        self.requested, self.reason = True, reason

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM is ours inside. To be entered in the main thread, after Ray has set a handler of its
        own."""
        previous = signal.signal(signal.SIGTERM, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _take(self, _signal: int, _frame: FrameType | None) -> None:
        if self._signalled:
            raise SystemExit(TERMINATED)
        self.requested = self._signalled = True
        say("SIGTERM: finishing the step, saving it, ending; another SIGTERM ends at once and loses the step")


@dataclass(frozen=True)
class Services:
    """What the stages of the loop work with: handles on processes and files, the configuration, and what
    follows from it."""

    config: RunConfig
    folder: Path
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    prompts: PromptStream
    """Training prompts, batch by batch."""
    validation_rows: list[PromptRow]
    scorer: ResponseScorer
    actor: ActorGroup
    critic: CriticGroup | None
    """The critic; None: nothing needs values."""
    reference: ReferenceGroup | None
    """The reference policy; None: nothing compares with it, or it is the actor without its LoRA adapters."""
    engines: EngineGroup
    placement: Placement
    """Numbers of processes, and threads of each."""
    transport: WeightTransport
    """How weights get from the actor to the engines."""
    checkpoints: CheckpointStore
    manifest: Manifest
    gap_limit: GapLimit
    """How far log-probs of trainer and engine may differ, on a step's own rollouts and on canary tokens."""
    stop: StopRequest
    """Whether the scheduler asked the run to end."""
    tracker: Tracker
    total_steps: int
    max_model_len: int
    """Tokens of prompt and response that an engine holds."""
    block_size: int
    """Tokens of one block of the engines' key-value cache."""

    def is_due(self, frequency: int, step: int) -> bool:
        """Whether something that happens every ``frequency`` steps (<= 0: never) and at the end happens
        now."""
        return frequency > 0 and (step % frequency == 0 or step == self.total_steps)

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint of ``step`` is due by ``trainer.save_freq`` (rounded up to steps that publish;
        <= 0: never)."""
        return self.is_due(
            self.config.async_training.rounded_to_publications(self.config.trainer.save_freq), step
        )
