"""A sender lends an update bucket by bucket: whole tensors, one bucket at a time, digests of all of them."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from shared_segments import nothing_left_behind
from weight_borrowers import CPU, copied_tensors, expected_parts, linear_stack

from verl_rc.runtime.weight_sync.manifest import tensor_digest
from verl_rc.runtime.weight_sync.sender import ModelWeights, WeightSender
from verl_rc.runtime.weight_sync.shared_bucket import copy_bucket
from verl_rc.runtime.weight_sync.transfer_group import TransferBrokenError


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    """``linear_stack`` in bf16: tensors of 48, 8, 24 and 6 bytes make two buckets of at most 64."""
    sender = WeightSender(
        ModelWeights(linear_stack()), rank=0, device=CPU, wire_dtype="bfloat16", bucket_bytes=64
    )
    with nothing_left_behind():
        yield sender
        sender.release()


def test_all_buckets_together_are_the_model(sender: WeightSender) -> None:
    received: dict[str, torch.Tensor] = {}
    for index in range(sender.num_buckets()):
        received |= copied_tensors(sender.offer(index, share=True))
    assert sender.num_buckets() == 2
    assert list(received) == list(sender.manifest.names)
    for name, tensor in expected_parts().items():
        assert torch.equal(received[name], tensor)
    receipt = sender.release()
    assert receipt.digests == {name: tensor_digest(tensor) for name, tensor in received.items()}


def test_only_one_bucket_is_lent_at_a_time(sender: WeightSender) -> None:
    first = sender.offer(0, share=True)
    sender.offer(1, share=True)
    with pytest.raises(RuntimeError, match="No such file"):
        copy_bucket(first, CPU)


class HalfConstant(ModelWeights):
    """The first layer is frozen."""

    def constant(self) -> frozenset[str]:
        return frozenset({"0.weight", "0.bias"})


def test_what_no_training_changes_is_in_whole_updates_alone() -> None:
    """Its 24 and 6 bytes lie in one bucket of 64."""
    sender = WeightSender(HalfConstant(linear_stack()), 0, CPU, "bfloat16", bucket_bytes=64)
    full = list(expected_parts())
    assert sender.update_manifest(True).names == tuple(full)
    assert sender.update_manifest(False).names == tuple(full[2:])
    assert (sender.num_buckets(full=True), sender.num_buckets(full=False)) == (2, 1)
    with nothing_left_behind():
        received = copied_tensors(sender.offer(0, share=True, full=False))
        receipt = sender.release()
    assert list(received) == full[2:]
    assert all(torch.equal(tensor, expected_parts()[name]) for name, tensor in received.items())
    assert receipt.digests == {name: tensor_digest(tensor) for name, tensor in received.items()}


def test_an_update_that_broke_off_is_not_counted_in_the_next(sender: WeightSender) -> None:
    sender.offer(0, share=True)
    sender.offer(1, share=True)
    sender.release()
    sender.offer(0, share=True)
    assert set(sender.release().digests) == {"0.weight", "0.bias"}


def test_an_offer_follows_the_weights(sender: WeightSender) -> None:
    with torch.no_grad():
        for parameter in sender._weights._model.parameters():
            parameter.fill_(3.0)
    assert set(copy_bucket(sender.offer(1, share=True), CPU).tolist()) == {3.0}


def test_a_broken_group_is_left_but_gathering_goes_on_to_the_end(
    sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, gathered = [], []
    gather = sender._weights.gather

    def broadcast(group: str, _: torch.Tensor) -> None:
        sent.append(group)
        if group == "of the dead":
            raise TransferBrokenError("gone")

    def counted(names: list[str], dtype: torch.dtype) -> list[torch.Tensor]:
        gathered.extend(names)
        return gather(names, dtype)

    monkeypatch.setattr("verl_rc.runtime.weight_sync.sender.broadcast_from_sender", broadcast)
    monkeypatch.setattr(sender._weights, "gather", counted)
    sender._group = "of the dead"
    with pytest.raises(TransferBrokenError, match="gone"):
        sender.send()
    assert sent == ["of the dead"]  # the others notice that the sender has left
    assert sender._group is None
    assert gathered == list(sender.manifest.names)  # what the other ranks wait for
    sender._group = "of the living"
    assert set(sender.send().digests) == set(sender.manifest.names)
    assert sent == ["of the dead", "of the living", "of the living"]


def test_an_update_is_sent_from_the_memory_of_one_bucket(
    sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2, D4: what is sent is right, and lies where the bucket before lay."""
    sent: list[tuple[int, list[float]]] = []

    def broadcast(group: str, wire: torch.Tensor) -> None:
        sent.append((wire.data_ptr(), wire.float().tolist()))

    monkeypatch.setattr("verl_rc.runtime.weight_sync.sender.broadcast_from_sender", broadcast)
    sender._group = "there"
    sender.send()
    assert len({place for place, _ in sent}) == 1
    expected = torch.cat([part.flatten() for part in expected_parts().values()]).float().tolist()
    assert [value for _, values in sent for value in values] == expected


def test_memory_that_a_dead_engine_never_returns_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: after an update that broke off, the bucket's memory is kept; before, it is freed with each
    update."""
    made: list[torch.Tensor] = []
    sender = WeightSender(ModelWeights(linear_stack()), 0, torch.device("cuda"), "bfloat16", bucket_bytes=64)
    monkeypatch.setattr(
        sender, "_allocate_bucket", lambda: made.append(torch.empty(64, dtype=torch.uint8)) or made[-1]
    )
    lent = SimpleNamespace(export=lambda: None, release=lambda: None)
    places: list[int] = []
    monkeypatch.setattr(
        "verl_rc.runtime.weight_sync.sender.share_bucket",
        lambda _, parts, memory: places.append(id(memory)) or (list(parts) and lent),
    )
    monkeypatch.setattr("verl_rc.runtime.weight_sync.sender.device_key", lambda _: "gpu")
    for interrupted, count in ((False, 1), (True, 2), (False, 2), (False, 2)):
        sender.offer(0, share=True)
        sender.offer(1, share=True)
        sender.release(interrupted)
        assert len(made) == count
        assert places[-2:] == [id(made[-1])] * 2
