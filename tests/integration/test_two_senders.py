"""Two trainer ranks gather their shards together, and one of them lends what the other needs not hold."""

from pathlib import Path
from typing import Any

import torch
from weight_borrowers import copied_tensors, expected_parts

from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.weight_sync.manifest import tensor_digest
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle


def test_two_ranks_gather_and_one_of_them_lends(tmp_path: Path) -> None:
    started = _start_together(tmp_path)
    received: dict[str, torch.Tensor] = {}
    try:
        assert [rank.call("local_elements") for rank in started] != [43, 43]
        _call_together(started, "count_gathers", [(), ()])
        for index in range(started[0].call("num_buckets")):
            handles = _call_together(started, "offer", [(index, False), (index, True)])
            assert handles[0].by_device == {}
            received |= copied_tensors(BucketHandle.merged(handles))
        receipts = _call_together(started, "release", [(), ()])
        # D2: a collective a bucket, in the precision of the wire. Of 4 x 6, 4, 3 x 4 and 3 weights a rank
        # gives half, whole rows.
        assert _call_together(started, "gathers", [(), ()]) == [[2 * (12 + 2), 2 * (8 + 2)]] * 2
    finally:
        for rank in started:
            rank.end()
    expected = expected_parts()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
    assert receipts[0].digests == {name: tensor_digest(tensor) for name, tensor in expected.items()}
    assert receipts[1].digests == {}


def _start_together(folder: Path) -> list[ChildProcess]:
    environment, store = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, str(folder / "store")
    ranks = [
        ChildProcess("sharded_sender:ShardedRank", environment, wait=False, rank=rank, store_path=store)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.answer()
    return ranks


def _call_together(ranks: list[ChildProcess], method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    for rank, given in zip(ranks, arguments, strict=True):
        rank.ask(method, *given)
    return [rank.answer() for rank in ranks]
