"""The two weight transports from the actor to the engines, on the driver's side."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from verl_rc.cluster.engine_group import EngineGroup, EnginesLostError
from verl_rc.cluster.model_groups import ActorGroup
from verl_rc.cluster.placement import Placement
from verl_rc.cluster.remote import wait_for_all
from verl_rc.config.errors import ConfigError
from verl_rc.config.rollout import RolloutConfig
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.proof import LoadReceipt
from verl_rc.weight_sync.sender import SendReceipt
from verl_rc.weight_sync.shared_bucket import BucketHandle, choose_offering_ranks
from verl_rc.weight_sync.transfer_group import TransferAddress

Receipts = Sequence[Sequence[LoadReceipt]]
"""Receipts by engine, one per worker."""


@dataclass(frozen=True)
class Staged:
    """Weights that engines load when they can."""

    version: int
    sent: SendReceipt


class WeightTransport(ABC):
    """Sends the actor's current weights to every engine. Methods raise ``EnginesLostError`` when an engine is
    lost.

    The first update has all tensors, because new engines have none, the others those that training changes.
    """

    def __init__(self, actor: ActorGroup, engines: EngineGroup) -> None:
        """``open`` comes before the first update."""
        self._actor, self._engines = actor, engines
        self._manifests = {whole: actor.manifest(whole) for whole in (True, False)}
        self._is_whole = self._is_first = True
        self.staged: Staged | None = None
        """The update that was staged last; None once its arrival is proven, or another update was delivered.
        """

    @property
    def manifest(self) -> Manifest:
        """The tensors of the update that was delivered or staged last."""
        return self._manifests[self._is_whole]

    def open(self) -> None:
        """Prepare for updates, the first of which has all tensors; call again after engines have been
        replaced."""
        self._connect()
        self._is_first = True

    def _begin(self) -> bool:
        """Begin an update; returns whether it has all tensors."""
        self._is_whole, self._is_first = self._is_first, False
        return self._is_whole

    @abstractmethod
    def _connect(self) -> None:
        """Bring the ranks and the engines that there are together."""

    @abstractmethod
    def deliver(self, version: int) -> tuple[SendReceipt, Receipts]:
        """Send the weights as ``version``; returns the receipts of sender and engines for
        ``check_receipts``."""

    def stage(self, version: int) -> None:
        """Send the weights, which engines load as ``version`` when they have ended what was submitted before.

        ``staged`` remembers them. Only where ``checkpoint_engine.stage_updates`` is set, see
        ``check_async_training``.
        """
        raise NotImplementedError

    def loaded(self) -> Receipts | None:
        """The engines' receipts of the update staged last; None: an engine has not loaded it yet."""
        raise NotImplementedError


class BroadcastTransport(WeightTransport):
    """Rank 0 of the actor broadcasts over a separate process group: gloo, or NCCL between GPUs."""

    def __init__(self, actor: ActorGroup, engines: EngineGroup, rollout: RolloutConfig) -> None:
        """``open`` makes the group."""
        super().__init__(actor, engines)
        self._workers_per_engine = rollout.tensor_model_parallel_size
        self._bucket_bytes = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20

    def _connect(self) -> None:
        """Create a process group of the sender and every engine worker, replacing the previous one."""
        host, port = self._actor.processes.listen()
        address = TransferAddress(host, port, 1 + self._engines.num_engines * self._workers_per_engine)
        joining = self._actor.join_transfer(address)
        self._engines.wait(self._engines.join_transfer(address, self._workers_per_engine), peers=joining)

    def deliver(self, version: int) -> tuple[SendReceipt, Receipts]:
        """See ``WeightTransport``."""
        self.staged = None
        whole = self._begin()
        receiving = self._engines.receive_weights(self.manifest, self._bucket_bytes, version)
        sending = self._actor.send_weights(whole)
        received, sent = self._engines.wait(receiving, peers=sending)
        return sent[0], list(received.values())

    def stage(self, version: int) -> None:
        """See ``WeightTransport``."""
        whole = self._begin()
        receiving = self._engines.stage_weights(self.manifest, self._bucket_bytes)
        _, sent = self._engines.wait(receiving, peers=self._actor.send_weights(whole))
        self._engines.load_staged(version)
        self.staged = Staged(version, sent[0])

    def loaded(self) -> Receipts | None:
        """See ``WeightTransport``."""
        received = [receipts for receipts in self._engines.loaded() if receipts is not None]
        return received if len(received) == self._engines.num_engines else None


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
        whole = self._begin()
        try:
            self._engines.begin_update()
            for index in range(self._actor.num_buckets(whole)):
                handles = wait_for_all(self._actor.offer_bucket(index, self._offers, whole))
                self._engines.load_bucket(BucketHandle.merged(handles))
            interrupted = False
        except EnginesLostError:
            self._engines.abandon_update()
            raise
        finally:
            sent = wait_for_all(self._actor.release_bucket(interrupted))[0]
        return sent, self._engines.finish_update(version)


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
