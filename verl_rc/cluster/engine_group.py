"""The engines as one: requests are split over them in contiguous shares, completions come back in the order of the
requests."""

from collections.abc import Sequence

from verl_rc.cluster.environment import engine_environment
from verl_rc.cluster.placement import Placement
from verl_rc.cluster.remote import Pending, RemoteProcess, longest_busy, wait_for_all
from verl_rc.data.batches import Completions
from verl_rc.rollout.sampling import EngineOptions, GenerationRequest, SamplingOptions
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.shared_bucket import BucketHandle
from verl_rc.weight_sync.transfer_group import TransferAddress


class EngineGroup:
    """All vLLM engines of a run."""

    worker = "verl_rc.rollout.engine:RolloutEngine"
    """What every process of the group builds, as ``module:Class``; tests plant faulty ones here."""

    def __init__(self, placement: Placement, rank_devices: Sequence[str] = ()) -> None:
        """Start one process per engine; ``build`` makes the engine in it.

        ``rank_devices``: the GPU of each trainer rank, where engines share them. Such an engine reserves no GPU from Ray, which
        could not give it those of several bundles, but sees the ones that its ranks were given.
        """
        environment = engine_environment(placement.engine_threads, placement.device, placement.one_node)
        shares = placement.shares_devices and placement.device == "cuda"
        self._engines = []
        for index, place in enumerate(placement.engine_places):
            beside = ",".join(rank_devices[rank] for rank in placement.ranks_beside(index)) if shares else ""
            own = {**environment, "CUDA_VISIBLE_DEVICES": beside} if shares else environment
            self._engines.append(RemoteProcess(f"rollout engine {index}", own, **place.options(reserve_gpu=not shares)))
        self.busy_seconds = 0.0
        """Seconds the slowest engine itself computed in the last call."""
        self._process_group_backend = "gloo" if placement.device == "cpu" else "nccl"

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return len(self._engines)

    def build(self, options: EngineOptions) -> list[Pending]:
        """Build the engines; returns at once."""
        return [process.build(self.worker, options=options) for process in self._engines]

    def block_size(self) -> int:
        """Tokens of one block of the key-value cache: the shortest prefix that can be cached."""
        return int(wait_for_all([self._engines[0].call("describe")])[0]["block_size"])

    def join_transfer(self, address: TransferAddress, workers_per_engine: int) -> list[Pending]:
        """Join the weight-transfer group behind the sender, who is rank 0."""
        return [
            engine.call("join_transfer", address, 1 + index * workers_per_engine, self._process_group_backend)
            for index, engine in enumerate(self._engines)
        ]

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> list[Pending]:
        """Take one weight update; each answer is a list of receipts, one per worker of the engine."""
        return [engine.call("receive_weights", manifest.to_plain(), bucket_bytes, version) for engine in self._engines]

    def device_keys(self) -> list[str]:
        """The devices that hold engine workers, as trainer ranks name theirs."""
        keys: list[list[str]] = wait_for_all([engine.call("device_keys") for engine in self._engines])
        return [key for of_engine in keys for key in of_engine]

    def begin_update(self) -> list[Pending]:
        """Make every engine's model loadable, before its first lent bucket."""
        return [engine.call("begin_update") for engine in self._engines]

    def load_bucket(self, handle: BucketHandle) -> list[Pending]:
        """Load one lent bucket; its lenders may take the memory back when all have answered."""
        return [engine.call("load_bucket", handle) for engine in self._engines]

    def finish_update(self, version: int) -> list[Pending]:
        """Call what was loaded ``version``; answers like ``receive_weights``."""
        return [engine.call("finish_update", version) for engine in self._engines]

    def sleep(self) -> list[Pending]:
        """Give up the memory of weights and key-value cache; each answer says whether that engine can."""
        return [engine.call("sleep") for engine in self._engines]

    def wake_up(self, *tags: str) -> list[Pending]:
        """Take memory again, ``weights`` or ``kv_cache``; each answer says whether that engine can sleep at all."""
        return [engine.call("wake_up", tags) for engine in self._engines]

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> Completions:
        """One completion per request, in order; the requests are shared out evenly."""
        size = -(-len(requests) // self.num_engines)
        shares = [list(requests[start : start + size]) for start in range(0, len(requests), size)]
        pending = [
            engine.call("generate", share, options)
            for engine, share in zip(self._engines, shares, strict=False)
        ]
        parts: list[Completions] = wait_for_all(pending)
        self.busy_seconds = longest_busy(pending)
        return Completions.cat(parts)

    def generate_on_each(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Completions]:
        """Every engine answers all requests: for comparing engines with the trainer one by one."""
        answers: list[Completions] = wait_for_all(
            [engine.call("generate", list(requests), options) for engine in self._engines]
        )
        return answers
