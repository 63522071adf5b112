"""The two transports of weights from the actor to the engines, as the driver sees them."""

from collections.abc import Sequence
from typing import Any, Protocol

from verl_rc.cluster.engine_group import EngineGroup, EnginesLostError
from verl_rc.cluster.model_groups import ActorGroup
from verl_rc.cluster.placement import Placement
from verl_rc.cluster.remote import wait_for_all
from verl_rc.config.errors import ConfigError
from verl_rc.config.run import RunConfig
from verl_rc.weight_sync.sender import SendReceipt
from verl_rc.weight_sync.shared_bucket import BucketHandle, choose_offering_ranks
from verl_rc.weight_sync.transfer_group import TransferAddress

Receipts = Sequence[Sequence[dict[str, Any]]]
"""For each engine, one receipt per worker."""


class WeightTransport(Protocol):
    """Takes the actor's current weights to every engine. Methods raise ``EnginesLostError`` when one is lost meanwhile."""

    def open(self) -> None:
        """Make ready for updates; again when engines have been replaced."""

    def deliver(self, version: int) -> tuple[SendReceipt, Receipts]:
        """Deliver them as ``version``; what was sent and what was received are for ``check_receipts`` to compare."""


class BroadcastTransport:
    """Rank 0 of the actor broadcasts over a process group of its own: gloo, or NCCL between GPUs."""

    def __init__(self, actor: ActorGroup, engines: EngineGroup, placement: Placement, config: RunConfig) -> None:
        """``open`` makes the group."""
        rollout = config.actor_rollout_ref.rollout
        self._actor, self._engines = actor, engines
        self._one_node = placement.one_node
        self._workers_per_engine = rollout.tensor_model_parallel_size
        self._manifest = actor.manifest()
        self._bucket_bytes = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20

    def open(self) -> None:
        """A group of the sender and every engine worker, in place of the one before."""
        host, port = self._actor.free_address()
        host = "127.0.0.1" if self._one_node else host
        address = TransferAddress(host, port, 1 + self._engines.num_engines * self._workers_per_engine)
        joining = self._actor.join_transfer(address)
        self._engines.wait(self._engines.join_transfer(address, self._workers_per_engine), beside=joining)

    def deliver(self, version: int) -> tuple[SendReceipt, Receipts]:
        """See ``WeightTransport``."""
        receiving = self._engines.receive_weights(self._manifest, self._bucket_bytes, version)
        sending = self._actor.send_weights()
        received, sent = self._engines.wait(receiving, beside=sending)
        return sent[0], list(received.values())


class IpcTransport:
    """Every rank lends one bucket after the other to the engine worker on its own device, which copies it."""

    def __init__(self, actor: ActorGroup, engines: EngineGroup) -> None:
        """``open`` finds out who lends to whom."""
        self._actor, self._engines = actor, engines
        self._num_buckets = actor.num_buckets()

    def open(self) -> None:
        """Which ranks lie beside engine workers. Raises ``ConfigError`` when a worker has no rank on its device."""
        try:
            self._offers = choose_offering_ranks(self._actor.device_keys(), self._engines.device_keys())
        except ValueError as error:
            raise ConfigError(f"{error} Pass actor_rollout_ref.rollout.checkpoint_engine.backend=broadcast.") from error

    def deliver(self, version: int) -> tuple[SendReceipt, Receipts]:
        """See ``WeightTransport``."""
        try:
            self._engines.begin_update()
            for index in range(self._num_buckets):
                handles = wait_for_all(self._actor.offer_bucket(index, self._offers))
                self._engines.load_bucket(BucketHandle.merged(handles))
        except EnginesLostError:
            self._engines.abandon_update()
            raise
        finally:
            sent = wait_for_all(self._actor.release_bucket())[0]
        return sent, self._engines.finish_update(version)


def open_transport(actor: ActorGroup, engines: EngineGroup, placement: Placement, config: RunConfig) -> WeightTransport:
    """The way that ``checkpoint_engine.backend`` names; ``auto`` lends memory where trainer and engines share GPUs."""
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    shares_gpus = placement.shares_devices and placement.device == "cuda"
    if backend == "ipc" or (backend == "auto" and shares_gpus):
        transport: WeightTransport = IpcTransport(actor, engines)
    else:
        transport = BroadcastTransport(actor, engines, placement, config)
    transport.open()
    return transport
