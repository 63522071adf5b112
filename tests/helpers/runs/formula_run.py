"""The loop with formulas for processes: trainer and engines are one number each; shared by the tests of the
loop."""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from made_samples import part
from small_models import small_run_config
from torch.utils.data import DataLoader

from verl_rc.algorithm.health.run_limits import count_skipped_updates
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.algorithm.rewards import RewardOutput
from verl_rc.metrics import Metric
from verl_rc.metrics.sinks import JsonlSink, Tracker
from verl_rc.records.batches import Timed, TokenBatch, TokenScores, TrainBatch
from verl_rc.records.dataset import EpochBatches, PromptRow, PromptStream
from verl_rc.records.optimizer_step import OptimizerStep
from verl_rc.records.parts import Sample
from verl_rc.records.ragged import Ragged
from verl_rc.runtime.checkpoint import CheckpointStore, RunState
from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.weight_sync.proof import GapLimit
from verl_rc.runtime.workers.updates import ActorReport, UpdateRequest
from verl_rc.trainer import checkpoints, weights
from verl_rc.trainer.cluster.engine_work import AssignedRequest
from verl_rc.trainer.guards import Guards
from verl_rc.trainer.services import Services
from verl_rc.trainer.stop import StopRequest
from verl_rc.trainer.train import train

STEPS = 4
WIDTH = 7
"""``data.max_response_length``."""
OVERRIDES = (
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=50",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=1.01",
    "algorithm.rollout_correction.rollout_rs_target_acceptance=0.6",
    "algorithm.rollout_correction.diagnostics=full",
    "trainer.alerts.reward_collapse=warn",
    "trainer.alerts.reward_window=1",
    "trainer.save_freq=1",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
)


class World:
    """Trainer and engines: one number each, which says what log-probs they give. Rank and engine group in
    one."""

    role, num_ranks = "actor", 1

    def __init__(self) -> None:
        self.trained = 0.0
        self.updates = 0
        self.engine = 0.0
        self.version = 0
        self.answers: list[Sample] = []
        """Of each request that was submitted, sampled at once; its number is its place."""
        self.handles: dict[int, AssignedRequest] = {}
        """What the driver holds of each."""
        self.under_way: set[int] = set()
        self.failure: Exception | None = None
        self.canaries: list[list[Sample]] = []
        """Of each publication whose canary tokens are generated beside other samples."""

    @property
    def processes(self) -> "World":
        return self

    def require_nodes(self) -> None:
        """No node is lost."""

    # the engines

    def submit(
        self, requests: Sequence[GenerationRequest], options: Any, *, owners: Sequence[Any], **_: Any
    ) -> list[int]:
        numbers = list(range(len(self.answers), len(self.answers) + len(requests)))
        self.answers += self.sample(requests)
        self.under_way |= set(numbers)
        self.note(numbers, requests, owners)
        return numbers

    def note(
        self, numbers: Sequence[int], requests: Sequence[GenerationRequest], owners: Sequence[Any]
    ) -> None:
        for number, request, owner in zip(numbers, requests, owners, strict=True):
            queued = SimpleNamespace(number=number, request=request)
            self.handles[number] = AssignedRequest(cast(Request, queued), 0, owner)

    def submitted(self) -> list[AssignedRequest]:
        return [self.handles[number] for number in sorted(self.under_way)]

    def begin_steps(self) -> None:
        pass

    def collect_parts(self, replace_lost: Any = None) -> tuple[list[AssignedRequest], dict[int, Any]]:
        """No update cuts a response: each is sampled at once."""
        return [], {}

    def collect(self, wait_seconds: float, replace_lost: Any = None) -> list[AssignedRequest]:
        return self.hand_over(self.look(wait_seconds, replace_lost))

    def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
        """The numbers of the requests that have ended."""
        if self.failure is not None:
            raise self.failure
        return sorted(self.under_way)

    def hand_over(self, numbers: Sequence[int]) -> list[AssignedRequest]:
        failures = self.failures(numbers)
        ended = [number for number in numbers if number not in failures]
        for number, outcome in [*failures.items(), *zip(ended, self.take(ended), strict=True)]:
            self.handles[number].outcome = outcome
        return [self.handles[number] for number in numbers]

    def failures(self, numbers: Sequence[int]) -> dict[int, str]:
        return {}

    def take(self, numbers: Sequence[int]) -> list[Sample]:
        assert self.under_way >= set(numbers)
        self.under_way -= set(numbers)
        return [self.answers[number] for number in numbers]

    def cancel(self, requests: Sequence[AssignedRequest]) -> None:
        numbers = {request.number for request in requests}
        assert self.under_way >= numbers
        self.under_way -= numbers

    def generate(
        self, requests: Sequence[GenerationRequest], options: Any, replace_lost: Any = None
    ) -> list[Sample]:
        assert not self.under_way, "validation and canaries sample alone"
        return self.sample(requests)

    def sample(self, requests: Sequence[GenerationRequest]) -> list[Sample]:
        """By the version that the engines hold."""
        samples = []
        for number, request in enumerate(requests):
            shifts = range(0, 3 * (2 + request.seed % 3), 3)
            tokens = torch.tensor([1 + (40503 * request.seed + 977 >> shift) % 7 for shift in shifts])
            log_probs = log_probs_of(tokens, self.engine) - 0.02 * (1 + self.engine) * (tokens % 3 - 1)
            grown = part(tokens.tolist(), self.version, log_probs.tolist())
            samples.append(Sample(number, [grown], finished=True))
        return samples

    def generate_on_each(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> list[list[Sample]]:
        return [self.generate(requests, options)]

    def submit_to_each(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> list[list[int]]:
        """A sample for each at the end of a list of their own; their numbers count down."""
        self.canaries.append(self.sample(requests))
        return [[-len(self.canaries)]]

    def finish(self, numbers: Sequence[int], replace_lost: Any = None) -> list[Sample]:
        (number,) = numbers
        return self.canaries[-number - 1]

    def wake_up(self, tag: str) -> None:
        pass

    def sleep(self) -> None:
        pass

    # the transport

    staged: Any = None
    manifest = SimpleNamespace(num_bytes=1, tensors=())

    def deliver(self, version: int) -> tuple[None, None]:
        assert not self.under_way, "weights changed under a response"
        self.engine, self.version = self.trained, version
        return None, None

    # the actor

    def compute_log_probs(self, tokens: Ragged[TokenBatch], limit: Any) -> Timed[Ragged[TokenScores]]:
        log_probs = log_probs_of(tokens.responses, self.trained)
        columns = {"log_probs": log_probs, "entropies": torch.ones_like(log_probs)}
        return Timed(tokens.become(TokenScores, **columns), 0.5)

    def update(
        self,
        batch: Ragged[TrainBatch],
        mini_batches: Sequence[MiniBatch],
        limit: Any,
        request: UpdateRequest,
    ) -> Timed[ActorReport]:
        """In step 2 the first gradient is not finite and the other mini-batches are empty; in step 3 all are
        empty."""
        planned = [mini.num_loss_tokens for mini in mini_batches]
        empty = [0] * len(planned)
        kept = {2: [planned[0], *empty[1:]], 3: empty}.get(request.policy_version + 1, planned)
        norm = math.nan if request.policy_version == 1 else 1.0
        steps = [OptimizerStep(norm) for count in kept if count]
        self.updates += 1
        self.trained += 0.1 + 0.01 * float((batch.advantages * batch.loss_mask).abs().sum())
        records = [Metric("actor/grad_norm", norm) for _ in steps]
        records.append(Metric("rollout_corr/skipped_updates", kept.count(0)))
        return Timed(ActorReport(records, steps, kept), 0.5)

    def save(self, folder: Path) -> list[Any]:
        folder.mkdir()
        (folder / "weights").write_text(json.dumps([self.trained, self.updates]))
        return []

    def load(self, folder: Path) -> None:
        self.trained, self.updates = json.loads((folder / "weights").read_text())

    def has_saved(self, wait: bool) -> list[Any]:
        return []


class Reference(World):
    """A policy that stays where it was."""

    def compute_log_probs(self, tokens: Ragged[TokenBatch], limit: Any) -> Timed[Ragged[TokenScores]]:
        return Timed(tokens.become(TokenScores, log_probs=log_probs_of(tokens.responses, 0.3)), 0.5)


class Scorer:
    """Good scores for the prompts of the first two steps, bad ones afterwards."""

    def score(self, rows: Sequence[PromptRow], texts: Sequence[str]) -> list[RewardOutput]:
        return [
            RewardOutput((1.0 if row.row_index < 4 else 0.0) + len(text) / 100, {})
            for row, text in zip(rows, texts, strict=True)
        ]


def log_probs_of(tokens: torch.Tensor, policy: float) -> torch.Tensor:
    return -0.5 - 0.1 * tokens.float() * (1 + 0.3 * policy)


class Rows(list[PromptRow]):
    """A dataset in memory."""

    def row(self, row_index: int) -> PromptRow:
        if row_index >= len(self):
            raise ValueError(f"there is no row {row_index}.")
        return self[row_index]


def prompt_stream() -> PromptStream:
    rows = Rows(
        PromptRow(row, [1 + row % 5, 2], [{"content": f"{row}"}], "table", None, {}) for row in range(12)
    )
    order = EpochBatches(12, 2, seed=1, shuffle=False)
    return PromptStream(DataLoader(rows, batch_sampler=order, collate_fn=list))  # type: ignore[arg-type]


def live(
    folder: Path,
    state: RunState,
    checkpoint: Path | None = None,
    *overrides: str,
    world: World | None = None,
    scorer: Scorer | None = None,
    steps: int = STEPS,
    **asynchrony: Any,
) -> World:
    """A run from ``state`` to the end; its models are those of the checkpoint.

    ``asynchrony``: values of the section ``async_training``, also those that are refused before a run starts.
    """
    world, config = world or World(), small_run_config(folder, *OVERRIDES, *overrides)
    section = config.async_training.model_copy(update=asynchrony)
    config = config.model_copy(update={"async_training": section})
    prompts = prompt_stream()
    if checkpoint is not None:
        world.load(checkpoint / "actor")
        if state.prompts:
            prompts.load_state_dict(state.prompts)

    def batch_decode(rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["x" * len(row) for row in rows]

    services = SimpleNamespace(
        config=config,
        placement=SimpleNamespace(device="cpu", trainer_threads=1, engine_threads=1),
        folder=folder,
        tokenizer=SimpleNamespace(pad_token_id=0, all_special_ids=[0], batch_decode=batch_decode),
        stop_token_ids=(0,),
        prompts=prompts,
        openings=None,
        validation_rows=[PromptRow(row, [3, row], [], "table", None, {}) for row in range(3)],
        scorer=scorer or Scorer(),
        actor=world,
        critic=None,
        frozen={"reference": Reference()},
        engines=world,
        transport=world,
        checkpoints=CheckpointStore(folder, None),
        flops={},
        gap_limit=GapLimit(plausible=0.15),
        stop=StopRequest(),
        tracker=Tracker([JsonlSink(folder, state.step)]),
        total_steps=steps,
        block_size=4,
    )
    services.guards = Guards(config.trainer.alerts, services.tracker, services.stop)
    services.is_due, services.saves_at = (
        partial(Services.is_due, services),
        partial(Services.saves_at, services),
    )
    train(cast(Services, services), state)
    services.tracker.close()
    return world


def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver not wait for processes that are formulas, nor draw its training curves, which takes
    most of such a run."""
    monkeypatch.setattr(checkpoints, "wait_for_all", lambda pending: [])
    monkeypatch.setattr(weights, "check_receipts", lambda *_: None)
    monkeypatch.setattr("verl_rc.trainer.train.draw_curves", lambda folder: "")
    patient = partial(count_skipped_updates, limit=100)
    monkeypatch.setattr("verl_rc.trainer.train.count_skipped_updates", patient)
