"""New engines get all tensors; engines that have them get those that training changes."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from verl_rc.config.rollout import RolloutConfig
from verl_rc.runtime.weight_sync.manifest import Manifest, TensorSpec
from verl_rc.trainer.cluster import weight_transport
from verl_rc.trainer.cluster.engine_group import EngineGroup
from verl_rc.trainer.cluster.model_groups import ActorGroup
from verl_rc.trainer.cluster.weight_transport import BroadcastTransport, IpcTransport, WeightTransport

WHOLE = Manifest((TensorSpec("constant", "float32", (5,)), TensorSpec("trained", "float32", (2,))))


class Group:
    """Actor and engines: an update of one bucket for the tensors that change, of two for all."""

    processes = SimpleNamespace(listen=lambda: ("host", 1))
    num_engines = 1

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.expected: list[tuple[str, ...]] = []

    def manifest(self, whole: bool) -> Manifest:
        return WHOLE if whole else WHOLE.without({"constant"})

    def num_buckets(self, whole: bool) -> int:
        return 2 if whole else 1

    def send_weights(self, whole: bool) -> list[None]:
        self.sent.append(whole)
        return [None]

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> dict[int, None]:
        self.expected.append(manifest.names)
        return {0: None}

    def stage_weights(self, manifest: Manifest, bucket_bytes: int) -> dict[int, None]:
        return self.receive_weights(manifest, bucket_bytes, 0)

    def offer_bucket(self, index: int, offers: Any, whole: bool) -> None:
        self.sent.append((index, whole))

    def wait(self, pending: Any, peers: Any = ()) -> tuple[dict[int, None], list[None]]:
        return {0: None}, [None]

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr(weight_transport, "wait_for_all", lambda _: [None])
    monkeypatch.setattr(weight_transport, "choose_offering_ranks", lambda *_: [True])
    monkeypatch.setattr(weight_transport.BucketHandle, "merged", lambda _: None)
    return Group()


def opened(kind: type[WeightTransport], group: Group, *arguments: Any) -> WeightTransport:
    transport = kind(cast(ActorGroup, group), cast(EngineGroup, group), *arguments)  # type: ignore[call-arg]
    transport.open()
    return transport


def test_a_broadcast_has_all_tensors_once_and_again_after_an_engine_was_replaced(group: Group) -> None:
    transport = opened(BroadcastTransport, group, RolloutConfig())
    transport.deliver(1)
    assert transport.manifest == WHOLE
    transport.deliver(2)
    assert transport.manifest.names == ("trained",)
    transport.stage(3)
    transport.open()
    transport.deliver(4)
    assert group.sent == [True, False, False, True]
    assert group.expected == [WHOLE.names, ("trained",), ("trained",), WHOLE.names]


def test_lent_buckets_are_those_of_all_tensors_once_and_again_after_an_engine_was_replaced(
    group: Group,
) -> None:
    transport = opened(IpcTransport, group)
    for version in (1, 2):
        transport.deliver(version)
    transport.open()
    transport.deliver(3)
    assert group.sent == [(0, True), (1, True), (0, False), (0, True), (1, True)]
    assert transport.manifest == WHOLE
