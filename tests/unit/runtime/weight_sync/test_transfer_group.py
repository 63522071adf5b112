"""A broadcast ends at its deadline when a member does not take part, also where the transport itself waits
longer."""

import time
from typing import Any

import pytest
import torch

from verl_rc.runtime.weight_sync.transfer_group import (
    TransferBrokenError,
    TransferGroup,
    broadcast_from_sender,
)


class Work:
    """As NCCL's: ``wait`` returns at once, and raises when the collective has failed."""

    def __init__(self, polls: int | None, fails: bool = False) -> None:
        self.polls, self.fails = polls, fails

    def is_completed(self) -> bool:
        if self.polls is None:
            return False
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> bool:
        if self.fails:
            raise RuntimeError("NCCL error: remote process exited")
        return True


class Group:
    """Answers a broadcast with the same work."""

    def __init__(self, work: Work) -> None:
        self.work, self.aborted = work, 0

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        assert (options.rootRank, options.rootTensor) == (0, 0)
        return self.work

    def abort(self) -> None:
        self.aborted += 1


def broadcast(group: Group, backend: str = "nccl", timeout_seconds: float = 0.2) -> None:
    broadcast_from_sender(TransferGroup(group, backend, timeout_seconds), torch.zeros(2))


def test_a_member_that_is_gone_ends_the_wait_and_the_group() -> None:
    """D3: NCCL's ``wait`` only orders streams, and a dead peer raises nothing."""
    group, began = Group(Work(polls=None)), time.monotonic()
    with pytest.raises(TransferBrokenError, match=r"did not take part within 0\.2 s"):
        broadcast(group)
    assert 0.2 <= time.monotonic() - began < 5
    assert group.aborted == 1


def test_a_collective_that_ends_in_time_is_waited_for() -> None:
    group = Group(Work(polls=3))
    broadcast(group, timeout_seconds=60)
    assert (group.work.polls, group.aborted) == (-1, 0)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_what_failed_is_a_broken_transfer(backend: str) -> None:
    with pytest.raises(TransferBrokenError, match="remote process exited"):
        broadcast(Group(Work(polls=0, fails=True)), backend)


def test_gloo_waits_by_itself() -> None:
    """Its work is completed by ``wait``, and knows its own limit."""
    broadcast(Group(Work(polls=None)), "gloo")
