"""The real driver, groups, transport and rank classes over processes that only book GPU memory: one number
per process and GPU.

A call happens when it is submitted; what it needed at most is charged until its answer is fetched, so calls
that run at the same time add up. Sizes are those of a 7B model on 8 ranks, GiB.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from formula_run import Scorer, World, log_probs_of, prompt_stream
from ray.exceptions import RayActorError
from small_models import small_run_config

from verl_rc.config.models import FsdpConfig
from verl_rc.config.run import RunConfig
from verl_rc.plan.memory import ModelShape
from verl_rc.records.batches import TokenBatch, TrainBatch
from verl_rc.records.dataset import PromptRow
from verl_rc.records.optimizer_step import OptimizerStep
from verl_rc.records.ragged import Column, Ragged
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.rollout.engine import Collected, EngineFacts, Request
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.weight_sync import sender
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.weight_sync.sender import WeightSender
from verl_rc.runtime.workers import sharded_model, trainer_rank
from verl_rc.runtime.workers.model_flops import ModelFlops
from verl_rc.runtime.workers.policy_worker import PolicyWorker
from verl_rc.runtime.workers.sharded_model import LearningModel
from verl_rc.runtime.workers.trainer_rank import TrainerRank
from verl_rc.runtime.workers.updates import ActorReport, UpdateReport
from verl_rc.trainer import setup, weights
from verl_rc.trainer.cluster import remote
from verl_rc.trainer.cluster.model_groups import ActorGroup
from verl_rc.trainer.cluster.placement import Placement
from verl_rc.trainer.train import train

CAPACITY = 79.1
"""H100, as the driver reports it."""
CONTEXT = 0.6
"""CUDA context of a process."""
SHARD, MOMENTS, GRADIENT = 3.55, 7.1, 28.4
"""Of a rank: fp32 weights, AdamW's moments, and the whole fp32 gradient."""
ACTIVATIONS, SCORING, LOADING, LAYER = 7.2, 10.0, 5.0, 2.0
"""Of an update beyond weights and gradient, of a full micro-batch's log-probs, while shards are read, of a
gathered layer."""
BUCKET = 2.0
ENGINE_WEIGHTS, GRAPHS = 14.2, 1.5
"""Of an engine in bf16, and what it keeps while it sleeps."""


QWEN_7B = ModelShape(7_615_616_512, 1_089_994_752, 0, 28, 3584, 152_064, 131_072)


class MemoryFaultError(AssertionError):
    """What would end a run on GPUs, or take memory from it in silence."""


@dataclass(eq=False)
class Memory:
    """What one process holds on each of its GPUs."""

    name: str
    gpus: tuple[int, ...]
    parts: dict[str, float] = field(default_factory=dict)
    cached: float = 0.0
    """Freed, and kept by the process for itself."""
    at_most: float = 0.0
    """In calls whose answers have not been fetched."""

    @property
    def held(self) -> float:
        return sum(self.parts.values()) + self.cached

    @property
    def charged(self) -> float:
        return max(self.held, self.at_most)


class Ledger:
    """All processes with GPU memory."""

    def __init__(self) -> None:
        self.processes: list[Memory] = []
        self.current = Memory("driver", ())
        """The process whose code runs."""
        self.peak = 0.0
        """The most that one GPU held."""
        self.rule = True
        """Whether a process may keep nothing that it freed when an engine on its GPU takes memory."""
        self.dies: tuple[str, str, int] | None = None
        """The process, the method and the number of the call in which it dies."""
        self.events: list[str] = []

    def beside(self, gpu: int, process: Memory | None = None) -> float:
        """Memory of other processes."""
        return sum(other.charged for other in self.processes if gpu in other.gpus and other is not process)

    def take(self, part: str, size: float) -> None:
        """By the current process, from what it has cached first."""
        mine = self.current
        mine.parts[part] = mine.parts.get(part, 0.0) + size
        mine.cached = max(0.0, mine.cached - size)
        mine.at_most = max(mine.at_most, mine.held)
        for gpu in mine.gpus:
            used = self.beside(gpu)
            self.peak = max(self.peak, used)
            if used > CAPACITY:
                each = ", ".join(f"{one.name} {one.charged:.1f}" for one in self.processes if gpu in one.gpus)
                raise MemoryFaultError(f"GPU {gpu} is out of memory: {used:.1f} of {CAPACITY} GiB ({each})")

    def free(self, part: str, cached: bool = True) -> None:
        size = self.current.parts.pop(part, 0.0)
        self.current.cached += size if cached else 0.0

    def use(self, part: str, size: float) -> None:
        """For a moment."""
        self.take(part, size)
        self.free(part)

    def empty_cache(self) -> None:
        self.current.cached = 0.0

    def hand_over(self, engine: Memory) -> None:
        """To an engine that takes memory."""
        for other in self.processes:
            if self.rule and other.cached and set(other.gpus) & set(engine.gpus):
                raise MemoryFaultError(
                    f"{other.name} keeps {other.cached:.1f} GiB that it freed, beside {engine.name}"
                )


class LedgerModule:
    """A model that moves by booking."""

    def __init__(self, ledger: Ledger, part: str) -> None:
        self.ledger, self.part = ledger, part

    def to(self, device: Any) -> None:
        if torch.device(device).type == "cpu":
            self.ledger.free(self.part)
        elif self.part not in self.ledger.current.parts:
            self.ledger.take(self.part, SHARD)


class LedgerModel(LearningModel):
    """The real ``in_use`` around memory that is booked."""

    def __init__(self, ledger: Ledger, role: str, fsdp: FsdpConfig) -> None:
        self._device, self._fsdp, self._ledger = torch.device("cuda"), fsdp, ledger
        self._offloads_moments = getattr(fsdp, "optimizer_offload", False)
        self._moments = f"{role}'s moments"
        self.module = cast(Any, LedgerModule(ledger, f"{role}'s weights"))
        if "context" not in ledger.current.parts:
            ledger.take("context", CONTEXT)
        ledger.use("loading", LOADING)
        self.module.to("cuda")
        self._has_moments = False
        self._offload()

    def _move_moments(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._ledger.free(self._moments)
        elif self._has_moments:
            self._ledger.take(self._moments, MOMENTS)

    def learn(self) -> None:
        with self.in_use(with_optimizer=True):
            self._ledger.take("gradient", GRADIENT)
            self._ledger.use("activations", ACTIVATIONS)
            if not self._has_moments:
                self._ledger.take(self._moments, MOMENTS)
                self._has_moments = True
            self._ledger.free("gradient")


class LedgerRank:
    """A rank of any role."""

    def __init__(self, ledger: Ledger, role: str, fsdp: FsdpConfig) -> None:
        self.ledger = ledger
        self.model = LedgerModel(ledger, role, fsdp)

    def forward(self, tokens: Ragged[TokenBatch]) -> None:
        """Of a batch; one row is a canary's."""
        with self.model.in_use():
            self.ledger.use("activations", SCORING if len(tokens.lengths["BR"]) > 1 else LAYER)


class LedgerActor(LedgerRank, PolicyWorker):
    """Lends by the code of the real rank."""

    def __init__(self, ledger: Ledger, config: RunConfig, address: RankAddress, total_steps: int) -> None:
        LedgerRank.__init__(self, ledger, "actor", config.actor_rollout_ref.actor.fsdp_config)
        self._weights_in_use, self._device = ExitStack(), torch.device("cuda")
        self._sender = WeightSender(
            LedgerWeights(ledger), address.rank, self._device, "bfloat16", bucket_bytes=8
        )

    def compute_log_probs(self, tokens: Ragged[TokenBatch], micro_batches: Any) -> list[Column]:
        self.forward(tokens)
        log_probs = log_probs_of(torch.tensor(tokens.columns["responses"]), 0.0).numpy()
        return [log_probs, np.ones_like(log_probs)]

    def estimate_rounding(self, tokens: Ragged[TokenBatch], micro_batches: Any) -> list[Column]:
        self.forward(tokens)
        return [np.ones(len(tokens.columns["responses"]), np.float32)]

    def update(self, batch: Ragged[TrainBatch], mini_batches: Sequence[Any], request: Any) -> ActorReport:
        self.model.learn()
        planned = [mini.num_loss_tokens for mini in mini_batches]
        return ActorReport([], [OptimizerStep(1.0)] * len(planned), planned)


class LedgerCritic(LedgerRank):
    def __init__(self, ledger: Ledger, config: RunConfig, address: RankAddress, total_steps: int) -> None:
        super().__init__(ledger, "critic", config.critic.fsdp_config)

    def count_flops(self) -> ModelFlops:
        return self.model.count_flops()

    def compute_values(self, tokens: Ragged[TokenBatch], micro_batches: Any) -> list[Column]:
        self.forward(tokens)
        return [np.zeros(len(tokens.columns["responses"]), np.float32)]

    def update(self, batch: Any, mini_batches: Sequence[Any]) -> UpdateReport:
        self.model.learn()
        return UpdateReport([], [OptimizerStep(1.0)] * len(mini_batches))


class LedgerReference(LedgerRank):
    def __init__(
        self, ledger: Ledger, config: RunConfig, address: RankAddress, total_steps: int, role: str
    ) -> None:
        super().__init__(ledger, "reference", config.actor_rollout_ref.ref.fsdp_config)

    def compute_log_probs(self, tokens: Ragged[TokenBatch], micro_batches: Any) -> list[Column]:
        self.forward(tokens)
        return [log_probs_of(torch.tensor(tokens.columns["responses"]), 0.3).numpy()]


class LedgerWeights:
    """Six weights of four elements, which make three buckets."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"w{index}": (2,) for index in range(6)}

    def constant(self) -> frozenset[str]:
        return frozenset()

    def gather(self, names: Sequence[str], dtype: torch.dtype) -> list[torch.Tensor]:
        assert "actor's weights" in self.ledger.current.parts, (
            "weights are gathered while they rest in host memory"
        )
        self.ledger.use("layer", LAYER)
        return [torch.zeros(2, dtype=dtype) for _ in names]


class BucketMemory:
    """Memory until the last reference is gone."""

    def __init__(self, ledger: Ledger) -> None:
        self.owner = ledger.current
        ledger.take("bucket", BUCKET)

    def __del__(self) -> None:
        self.owner.parts.pop("bucket")
        self.owner.cached += BUCKET


class LentBucket:
    """In that memory, which it refers to."""

    def __init__(self, parts: Iterable[torch.Tensor], memory: BucketMemory) -> None:
        assert list(parts)
        self.memory: BucketMemory | None = memory

    def export(self) -> str:
        return "handle"

    def release(self) -> None:
        self.memory = None


class LedgerEngine:
    """vLLM as gpu.md describes it: it measures what is free, sleeps at level 2, and wakes by tags."""

    def __init__(self, ledger: Ledger, options: VllmOptions) -> None:
        self.ledger, self.world = ledger, World()
        self.can_sleep = options.arguments["enable_sleep_mode"]
        self.memory = ledger.current
        ledger.hand_over(self.memory)
        wanted = options.arguments["gpu_memory_utilization"] * CAPACITY
        for gpu in self.memory.gpus:
            free = CAPACITY - ledger.beside(gpu, self.memory)
            if free < wanted:
                raise MemoryFaultError(
                    f"{self.memory.name} is refused: {free:.1f} GiB are free, it wants {wanted:.1f}"
                )
        self.seen = {gpu: ledger.beside(gpu, self.memory) for gpu in self.memory.gpus}
        self.weights = ENGINE_WEIGHTS / len(self.memory.gpus)
        self.cache = wanted - self.weights - GRAPHS
        ledger.take("graphs", GRAPHS)
        self.wake_up(["weights", "kv_cache"])
        self.holds = False
        """Whether it has whole weights."""
        self.samples: list[Request] = []

    def built(self) -> None:
        """The end of its start, in which it has measured."""
        for gpu, before in self.seen.items():
            if self.ledger.beside(gpu, self.memory) != before:
                raise MemoryFaultError(
                    f"memory of other processes on GPU {gpu} changed while {self.memory.name} started"
                )

    def facts(self) -> EngineFacts:
        return EngineFacts(block_size=4)

    def device_keys(self) -> list[str]:
        return [f"GPU-{gpu}" for gpu in self.memory.gpus]

    def sleep(self) -> None:
        if self.can_sleep:
            self.ledger.free("engine weights", cached=False)
            self.ledger.free("cache", cached=False)
            self.holds = False

    def wake_up(self, tags: Sequence[str]) -> None:
        self.ledger.hand_over(self.memory)
        sizes = {"engine weights": self.weights, "cache": self.cache}
        for part in ("engine weights" if tag == "weights" else "cache" for tag in tags):
            if part not in self.memory.parts:
                self.ledger.take(part, sizes[part])

    def begin_update(self) -> None:
        assert "engine weights" in self.memory.parts, "an update comes to an engine that sleeps"

    def load_bucket(self, handle: Any) -> None:
        assert set(handle.by_device) >= set(self.device_keys())
        # Its own copy, and what the layerwise reload keeps until a layer is complete.
        self.ledger.take("copies", 2 * BUCKET)
        self.ledger.free("copies", cached=False)

    def finish_update(self, version: int) -> list[LoadReceipt]:
        self.holds, self.world.version = True, version
        return [LoadReceipt({}, []) for _ in self.memory.gpus]

    def abandon_update(self) -> None:
        self.holds = False

    def submit(self, samples: Sequence[Request]) -> None:
        self.samples += samples

    def collect(
        self, at_least: int, wait_seconds: float | None, linger_seconds: float | None = None
    ) -> Collected:
        taken, self.samples = self.samples[:at_least], self.samples[at_least:]
        sampled = self.sample([one.request for one in taken])
        return Collected(
            [replace(sample, number=one.number) for one, sample in zip(taken, sampled, strict=True)]
        )

    def generate(self, requests: Any, options: Any) -> Any:
        return self.sample(requests)

    def sample(self, requests: Any) -> Any:
        assert self.holds, f"{self.memory.name} samples without weights"
        assert "cache" in self.memory.parts, f"{self.memory.name} samples without a cache"
        return self.world.sample(requests)


@dataclass(eq=False)
class Reference:
    """A pending answer, as a reference to an object of Ray."""

    memory: Memory
    result: Any = None
    error: Exception | None = None
    then: Callable[[], None] | None = None

    def get(self, ledger: Ledger) -> Any:
        self.memory.at_most = 0.0
        if self.then is not None:
            ledger.current, then, self.then = self.memory, self.then, None
            then()
        if self.error is not None:
            raise self.error
        return self.result, 0.0, 0.5


class FakeActor:
    """A process, as an actor of Ray: methods with ``remote``."""

    def __init__(
        self, ledger: Ledger, classes: dict[str, Callable[..., Any]], name: str, gpus: tuple[int, ...]
    ) -> None:
        self._ledger, self._classes, self._dead = ledger, classes, False
        self._memory = Memory(name, gpus)
        ledger.processes.append(self._memory)
        self.identity = SimpleNamespace(remote=lambda: Reference(self._memory))
        self.run = SimpleNamespace(remote=lambda task, *arguments: getattr(self, f"_{task}")(*arguments))

    def kill(self) -> None:
        if self._memory in self._ledger.processes:
            self._ledger.processes.remove(self._memory)

    def _gpu_bytes(self) -> Reference:
        return Reference(self._memory, int(CAPACITY * (1 << 30)))

    def _listen(self, host: str | None) -> Reference:
        return Reference(self._memory, ("127.0.0.1", 1))

    def _visible_devices(self) -> Reference:
        return Reference(self._memory, ",".join(map(str, self._memory.gpus)))

    def _prepare(self, target: str) -> Reference:
        return Reference(self._memory)

    def _build(self, target: str, arguments: dict[str, Any]) -> Reference:
        self._ledger.current = self._memory
        self._ledger.events.append(f"{self._memory.name} starts")
        self._object = self._classes[target.partition(":")[2]](self._ledger, **arguments)
        return Reference(self._memory, 1, then=getattr(self._object, "built", None))

    def _call(self, method: str, *arguments: Any) -> Reference:
        ledger = self._ledger
        ledger.current = self._memory
        who, what = self._memory.name, method
        if method == "call":  # of a role
            who, what = f"{arguments[0]} rank {who.rpartition(' ')[2]}", arguments[1]
        ledger.events.append(f"{who} {what}")
        if ledger.dies is not None and ledger.dies[:2] == (who, what):
            *_, number = ledger.dies
            ledger.dies = (who, what, number - 1) if number > 1 else None
            self._dead = number == 1
            if self._dead:
                self.kill()
        if self._dead:
            return Reference(self._memory, error=RayActorError())
        return Reference(self._memory, getattr(self._object, method)(*arguments))


PROCESS_CLASSES = {
    "TrainerRank": lambda ledger, **arguments: TrainerRank(**arguments),
    "LedgerEngine": LedgerEngine,
}
WORKERS = {"PolicyWorker": LedgerActor, "CriticWorker": LedgerCritic, "ReferenceWorker": LedgerReference}


class Loader:
    """Prompts for more steps than are trained."""

    dataset = SimpleNamespace(
        describe_lengths=lambda: "",
        unread_columns=list,
        data_sources=dict,
        without_ground_truth=lambda: None,
    )

    def __len__(self) -> int:
        return 6


class FakePlace:
    """A GPU of the placement group."""

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu

    def options(self, reserve_gpu: bool = True) -> dict[str, Any]:
        return {"gpu": self.gpu}


def processes_that_book(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """``RemoteProcess`` as it is, over fakes of Ray's actors."""
    starting = [""]
    """The name of the process that is being started."""

    def options(gpu: int, **_: Any) -> Any:
        def start(environment: dict[str, str]) -> FakeActor:
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            gpus = (gpu,) if visible is None else tuple(int(one) for one in visible.split(","))
            return FakeActor(ledger, PROCESS_CLASSES, starting[0], gpus)

        return SimpleNamespace(remote=start)

    real_start = remote.RemoteProcess._start

    def start_named(process: remote.RemoteProcess) -> None:
        starting[0] = process.name
        real_start(process)

    fake_ray = SimpleNamespace(
        wait=lambda references, num_returns, timeout: (references[:1], references[1:]),
        get=lambda reference: reference.get(ledger),
        kill=lambda actor: actor.kill(),
        put=lambda argument: argument,
    )
    workers = SimpleNamespace(**{name: partial(worker, ledger) for name, worker in WORKERS.items()})
    monkeypatch.setattr(
        trainer_rank,
        "construct",
        lambda target, arguments: getattr(workers, target.split(":")[1])(**arguments),
    )
    # A run in the same test process may have put faulty classes in their place.
    monkeypatch.setattr(ActorGroup, "worker", "ledger:PolicyWorker")
    monkeypatch.setattr(VllmOptions, "worker", "ledger:LedgerEngine")
    monkeypatch.setattr(remote, "ray", fake_ray)
    monkeypatch.setattr(remote, "_Process", SimpleNamespace(options=options))
    monkeypatch.setattr(remote.RemoteProcess, "_start", start_named)
    monkeypatch.setattr(remote, "end_process", lambda process: None)
    monkeypatch.setattr(remote, "identity_of", lambda process: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", ledger.empty_cache)
    monkeypatch.setattr(sender, "share_bucket", lambda specs, parts, memory: LentBucket(parts, memory))
    monkeypatch.setattr(WeightSender, "_allocate_bucket", lambda _: BucketMemory(ledger))
    monkeypatch.setattr(
        sender,
        "device_key",
        lambda device: f"GPU-{ledger.current.gpus[0]}" if device.type == "cuda" else "cpu@host",
    )


def train_on_ledger(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, ledger: Ledger | None = None
) -> Ledger:
    """Set a run of two steps up on 8 GPUs by ``open_run``, train by ``train``; returns the books."""
    ledger = ledger or Ledger()
    processes_that_book(ledger, monkeypatch)
    config = small_run_config(
        folder,
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.sync_proof.canary_num_prompts=8",  # a row for each rank
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        f"trainer.default_local_dir={folder}",
        "trainer.report=never",
        *overrides,
    )
    places = [FakePlace(gpu) for gpu in range(8)]
    of_engines = places[:: 8 // config.num_engines]
    placement = Placement(
        "cuda", 8, config.num_engines, 1, 1, True, True, cast(Any, places), cast(Any, of_engines)
    )
    rows = [PromptRow(row, [3, row], [], "table", "1", {}) for row in range(3)]
    tokenizer = SimpleNamespace(
        pad_token_id=0,
        eos_token_id=0,
        all_special_ids=[0],
        batch_decode=lambda rows, skip_special_tokens: ["x" * len(row) for row in rows],
    )
    replacements: dict[str, Any] = {
        "refuse_too_little_memory": lambda config: None,
        "ray": SimpleNamespace(shutdown=lambda: None),
        "WATCHDOG": SimpleNamespace(watching=lambda *_: nullcontext()),
        "plan_placement": lambda config: placement,
        "unsupported_model": lambda *_: None,
        "load_tokenizer": lambda *_: tokenizer,
        "build_train_loader": lambda *_: Loader(),
        "PromptStream": lambda *_: prompt_stream(),
        "build_validation_rows": lambda *_: rows,
        "ModelShape": SimpleNamespace(from_model_folder=lambda *_: QWEN_7B),
        "open_scorer": lambda *_: nullcontext(Scorer()),
    }
    for name, value in replacements.items():
        monkeypatch.setattr(setup, name, value)
    monkeypatch.setattr(sharded_model, "count_flops", lambda *_: ModelFlops(1e10, {}, 1e15))
    monkeypatch.setattr(weights, "check_receipts", lambda *_: None)
    monkeypatch.setattr("verl_rc.trainer.train.draw_curves", lambda folder: "")
    started: Future[None] = Future()
    started.set_result(None)
    with setup.open_run(config, started) as (services, state):
        train(services, state)
    return ledger
