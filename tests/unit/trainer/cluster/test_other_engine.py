"""The cluster runs an engine that no file of the package names, by its options alone."""

import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bigram_engine import BigramOptions, Bigrams
from shared_segments import nothing_left_behind

from verl_rc.records.parts import Part, num_tokens
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.weight_sync.proof import check_receipts
from verl_rc.runtime.weight_sync.sender import ModelWeights, WeightSender
from verl_rc.trainer.cluster import engine_group
from verl_rc.trainer.cluster.engine_group import EngineGroup

OPTIONS = SamplingOptions(1.0, 1.0, -1, max_tokens=6, stop_token_ids=(), ignore_eos=True)


class Call:
    """A call that has been answered."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.sent_at = time.time()


class ProcessHere:
    """``RemoteProcess`` in this process."""

    def __init__(self, name: str, environment: dict[str, str], **slots: Any) -> None:
        self.name = name

    def prepare(self, target: str) -> Call:
        return Call(import_module(target.split(":")[0]))

    def build(self, target: str, **arguments: Any) -> Call:
        module, name = target.split(":")
        self.engine = getattr(import_module(module), name)(**arguments)
        return Call(None)

    def call(self, method: str, *arguments: Any, task: str | None = None) -> Call:
        return Call(getattr(self.engine, method)(*arguments))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> EngineGroup:
    """Two engines that are tables, which give a sample four tokens of each version."""

    def as_completed(calls: Sequence[Call], *_: Any) -> Iterator[tuple[Call, Any]]:
        return ((call, call.answer) for call in calls)

    monkeypatch.setattr(engine_group, "RemoteProcess", ProcessHere)
    monkeypatch.setattr(engine_group, "as_completed", as_completed)
    monkeypatch.setattr(engine_group, "first_answered", lambda calls, _: calls)
    monkeypatch.setattr(engine_group, "shared", lambda argument: argument)
    place = SimpleNamespace(options=lambda reserve_gpu: {})
    of_cpu = {"engine_threads": 1, "device": "cpu", "one_node": True, "shares_devices": False}
    placement: Any = SimpleNamespace(
        **of_cpu, engine_places=[place, place], num_engines=2, nodes_per_engine=1
    )
    group, options = EngineGroup(placement), BigramOptions(deterministic_steps=4)
    group.prepare(options)
    group.build(options, timeout_seconds=1.0)
    return group


def publish(group: EngineGroup, version: int) -> None:
    sender = WeightSender(ModelWeights(Bigrams(13)), 0, torch.device("cpu"), "float32", bucket_bytes=4 * 169)
    with nothing_left_behind():
        group.begin_update()
        for index in range(sender.num_buckets()):
            group.load_bucket(sender.offer(index, True))
        sent = sender.release()
    check_receipts(sender.manifest, sent, group.finish_update(version), version)


def test_samples_of_two_versions_come_from_both_engines_in_the_order_of_their_requests(
    group: EngineGroup,
) -> None:
    publish(group, 3)
    group.submit([GenerationRequest([seed], seed) for seed in range(6)], OPTIONS, owners="abcdef")
    group.begin_steps()
    publish(group, 4)
    ended, interrupted = group.collect_parts()
    assert (ended, sorted(interrupted)) == ([], [0, 1])
    requests = group.submitted()
    assert [num_tokens(request.queued.request.so_far.parts) for request in requests] == [4] * 6
    group.begin_steps()
    samples = group.finish(requests)
    assert [one.number for one in samples] == list(range(6))
    assert [one.engine for one in samples] == [0, 1, 0, 1, 0, 1]  # by their seeds
    for one in samples:
        lengths = [(part.version, len(part.token_ids)) for part in one.parts if isinstance(part, Part)]
        assert lengths == [(3, 4), (4, 2)]
