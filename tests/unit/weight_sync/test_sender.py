"""A sender lends an update bucket by bucket: whole tensors, one bucket at a time, digests of all of them."""

from collections.abc import Iterator

import pytest
import torch
from shared_segments import nothing_left_behind
from weight_borrowers import CPU, copied_tensors, expected_parts, linear_stack

from verl_rc.weight_sync.manifest import tensor_digest
from verl_rc.weight_sync.sender import ModelWeights, WeightSender
from verl_rc.weight_sync.shared_bucket import copy_bucket
from verl_rc.weight_sync.transfer_group import TransferBrokenError


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    """``linear_stack`` in bf16: tensors of 48, 8, 24 and 6 bytes make two buckets of at most 64."""
    sender = WeightSender(ModelWeights(linear_stack()), rank=0, device=CPU, wire_dtype="bfloat16", bucket_bytes=64)
    with nothing_left_behind():
        yield sender
        sender.release()


def test_all_buckets_together_are_the_model(sender: WeightSender) -> None:
    received: dict[str, torch.Tensor] = {}
    for index in range(sender.num_buckets):
        received |= copied_tensors(sender.offer(index, share=True))
    assert sender.num_buckets == 2
    assert list(received) == list(sender.manifest.names)
    for name, tensor in expected_parts().items():
        assert torch.equal(received[name], tensor)
    receipt = sender.release()
    assert receipt.num_bytes == 2 * (24 + 4 + 12 + 3)
    assert receipt.digests == {name: tensor_digest(tensor) for name, tensor in received.items()}


def test_only_one_bucket_is_lent_at_a_time(sender: WeightSender) -> None:
    first = sender.offer(0, share=True)
    sender.offer(1, share=True)
    with pytest.raises(RuntimeError, match="No such file"):
        copy_bucket(first, CPU)


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


def test_a_broken_group_is_left_but_gathering_goes_on_to_the_end(sender: WeightSender, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, gathered = [], []
    gather = sender._weights.gather

    def broadcast(group: str, _: torch.Tensor) -> None:
        sent.append(group)
        if group == "of the dead":
            raise TransferBrokenError("gone")

    def counted(name: str) -> torch.Tensor:
        gathered.append(name)
        return gather(name)

    monkeypatch.setattr("verl_rc.weight_sync.sender.broadcast_from_sender", broadcast)
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
