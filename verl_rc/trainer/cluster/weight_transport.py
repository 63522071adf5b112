"""The two weight transports from the actor to the engines, on the driver's side."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from verl_rc.config.errors import ConfigError
from verl_rc.config.rollout import RolloutConfig
from verl_rc.runtime.weight_sync.manifest import Manifest
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.weight_sync.sender import SendReceipt
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle, choose_offering_ranks
from verl_rc.runtime.weight_sync.transfer_group import TransferAddress
from verl_rc.trainer.cluster.engine_group import EngineGroup, EnginesLostError
from verl_rc.trainer.cluster.model_groups import ActorGroup
from verl_rc.trainer.cluster.placement import Placement
from verl_rc.trainer.cluster.remote import wait_for_all

Receipts = Sequence[Sequence[LoadReceipt]]
"""Receipts by engine, one per worker."""


@dataclass(frozen=True)
class StagedUpdate:
    """An update that engines have received and load when they can."""

    version: int
    send_receipt: SendReceipt


class WeightTransport(ABC):
    """Sends the actor's current weights to every engine. Methods raise ``EnginesLostError`` when an engine is
    lost.

    The first update has all tensors, because new engines have none; later ones have the tensors that training
    changes.
    """

    def __init__(self, actor: ActorGroup, engines: EngineGroup) -> None:
        """Call ``open`` before the first update."""
        self._actor, self._engines = actor, engines
        self._manifests = {all_tensors: actor.manifest(all_tensors) for all_tensors in (True, False)}
        self._sends_all_tensors = self._is_first = True
        self.staged: StagedUpdate | None = None
        """The last staged update; None once its receipts are checked, or another update was delivered."""

    @property
    def manifest(self) -> Manifest:
        """The tensors of the last update that was delivered or staged."""
        return self._manifests[self._sends_all_tensors]

    def open(self) -> None:
        """Prepare for updates, the first of which has all tensors; call it again after engines were
        replaced."""
        self._connect()
        self._is_first = True

    def _begin(self) -> bool:
        """Begin an update; returns whether it has all tensors."""
        self._sends_all_tensors, self._is_first = self._is_first, False
        return self._sends_all_tensors

    @abstractmethod
    def _connect(self) -> None:
        """Connect the ranks with the engines."""

    @abstractmethod
    def deliver(self, version: int) -> tuple[SendReceipt, Receipts]:
        """Send the weights as ``version``; returns the receipts of sender and engines for
        ``check_receipts``."""

    def stage(self, version: int) -> None:
        """Send the weights and set ``staged``; each engine loads them as ``version`` once it has ended the
        requests submitted before.

        Only where ``checkpoint_engine.stage_updates`` is set, see ``check_async_training``.
        """
        raise NotImplementedError

    def loaded(self) -> Receipts | None:
        """The engines' receipts of the last staged update. None if an engine has not loaded it yet."""
        raise NotImplementedError


class BroadcastTransport(WeightTransport):
    """Rank 0 of the actor broadcasts over a separate process group: gloo, or NCCL between GPUs."""

    def __init__(self, actor: ActorGroup, engines: EngineGroup, rollout: RolloutConfig) -> None:
        """``open`` creates the process group."""
        super().__init__(actor, engines)
        self._workers_per_engine = rollout.tensor_model_parallel_size
        self._bucket_bytes = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20

    def _connect(self) -> None:
        """Create a process group of the sender and every engine worker, replacing the previous one."""
        host, port = self._actor.processes.listen()
        address = TransferAddress(host, port, 1 + self._engines.num_engines * self._workers_per_engine)
        join_calls = self._actor.join_transfer(address)
        self._engines.wait(self._engines.join_transfer(address, self._workers_per_engine), peers=join_calls)

    def deliver(self, version: int) -> tuple[SendReceipt, Receipts]:
        """See ``WeightTransport``."""
        self.staged = None
        all_tensors = self._begin()
        load_calls = self._engines.receive_weights(self.manifest, self._bucket_bytes, version)
        send_calls = self._actor.send_weights(all_tensors)
        load_receipts, send_receipt = self._engines.wait(load_calls, peers=send_calls)
        return send_receipt[0], list(load_receipts.values())

    def stage(self, version: int) -> None:
        """See ``WeightTransport``."""
        all_tensors = self._begin()
        load_calls = self._engines.stage_weights(self.manifest, self._bucket_bytes)
        _, send_receipt = self._engines.wait(load_calls, peers=self._actor.send_weights(all_tensors))
        self._engines.load_staged(version)
        self.staged = StagedUpdate(version, send_receipt[0])

    def loaded(self) -> Receipts | None:
        """See ``WeightTransport``."""
        load_receipts = [receipts for receipts in self._engines.loaded() if receipts is not None]
        return load_receipts if len(load_receipts) == self._engines.num_engines else None


class IpcTransport(WeightTransport):
    """Every rank shares one bucket at a time with the engine worker on its device, which copies it. Nothing
    is staged in lent memory."""

    def _connect(self) -> None:
        """Match ranks and engine workers by device. Raises ``ConfigError`` when a worker has no rank on its
        device."""
        try:
            self._offers = choose_offering_ranks(self._actor.device_keys(), self._engines.device_keys())
        except ValueError as error:
            raise ConfigError(
                f"{error} Pass actor_rollout_ref.hybrid_engine=False, for GPUs of their own."
            ) from error

    def deliver(self, version: int) -> tuple[SendReceipt, Receipts]:
        """See ``WeightTransport``."""
        interrupted = True
        all_tensors = self._begin()
        try:
            self._engines.begin_update()
            for index in range(self._actor.num_buckets(all_tensors)):
                handles = wait_for_all(self._actor.offer_bucket(index, self._offers, all_tensors))
                self._engines.load_bucket(BucketHandle.merged(handles))
            interrupted = False
        except EnginesLostError:
            self._engines.abandon_update()
            raise
        finally:
            send_receipt = wait_for_all(self._actor.release_bucket(interrupted))[0]
        return send_receipt, self._engines.finish_update(version)


def open_transport(
    actor: ActorGroup, engines: EngineGroup, placement: Placement, rollout: RolloutConfig
) -> WeightTransport:
    """Open the transport of ``checkpoint_engine.backend``; ``auto`` is ipc when trainer and engines share
    GPUs."""
    backend = rollout.checkpoint_engine.backend
    shares_gpus = placement.shares_devices and placement.device == "cuda"
    if backend == "ipc" or (backend == "auto" and shares_gpus):
        transport: WeightTransport = IpcTransport(actor, engines)
    else:
        transport = BroadcastTransport(actor, engines, rollout)
    transport.open()
    return transport
