"""A bucket on a GPU is copied by another process on the same GPU, and its memory comes back."""

from collections.abc import Iterator

import pytest
import torch

from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.weight_sync.manifest import TensorSpec
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle, device_key, share_bucket

NUM_ELEMENTS = 1 << 20
SPECS = (TensorSpec("w", "bfloat16", (NUM_ELEMENTS,)),)


@pytest.fixture
def borrower() -> Iterator[ChildProcess]:
    process = ChildProcess("weight_borrowers:Borrower", {})
    yield process
    process.end()


@pytest.mark.gpu
def test_every_bucket_arrives_and_none_stays(borrower: ChildProcess) -> None:
    device = torch.device("cuda", 0)
    values = (torch.arange(NUM_ELEMENTS) % 251).bfloat16()
    before = torch.cuda.memory_allocated(device)
    for factor in (1, 2, 3):
        memory = torch.empty(2 * NUM_ELEMENTS, dtype=torch.uint8, device=device)
        bucket = share_bucket(SPECS, [(factor * values).to(device)], memory)
        handle = BucketHandle(SPECS, {device_key(device): bucket.export()})
        assert borrower.call("copied", handle, "cuda:0") == (factor * values).float().tolist()
        bucket.release()
        del bucket, handle, memory
        assert torch.cuda.memory_allocated(device) == before
