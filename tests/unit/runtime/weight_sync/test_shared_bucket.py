"""Lent buckets arrive in another process bit for bit, and leave nothing behind, whatever goes wrong."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from shared_segments import nothing_left_behind
from small_runs import HELPERS, ROOT
from weight_borrowers import CPU, Borrower

from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.weight_sync import shared_bucket
from verl_rc.runtime.weight_sync.manifest import TensorSpec
from verl_rc.runtime.weight_sync.shared_bucket import (
    BucketHandle,
    CudaIpcHandle,
    SharedBucket,
    choose_offering_ranks,
    copy_bucket,
    device_key,
    share_bucket,
    without_expandable_segments,
)

SPECS = (TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "bfloat16", (1,)))
PARTS = [torch.tensor([1.0, -2.0, 3.5, 0.0, 1e-30, 256.0]).bfloat16(), torch.tensor([7.0]).bfloat16()]
VALUES = torch.cat(PARTS).float().tolist()


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture(scope="module")
def borrower() -> Iterator[ChildProcess]:
    process = ChildProcess("weight_borrowers:Borrower", {})
    yield process
    process.end()


def handle_of(bucket: SharedBucket, specs: tuple[TensorSpec, ...] = SPECS) -> BucketHandle:
    return BucketHandle(specs, {device_key(CPU): bucket.export()})


def test_another_process_copies_what_was_lent_again_and_again(borrower: ChildProcess) -> None:
    for factor in (1.0, 2.0):
        bucket = share_bucket(SPECS, [factor * part for part in PARTS])
        handle = handle_of(bucket)
        assert borrower.call("copied", handle) == [factor * value for value in VALUES]
        assert borrower.call("copied", handle) == [factor * value for value in VALUES]
        bucket.release()
        with pytest.raises(RuntimeError, match="No such file"):
            borrower.call("copied", handle)


def test_a_copy_outlives_the_lent_memory_and_cannot_change_it() -> None:
    bucket = share_bucket(SPECS, PARTS)
    first = copy_bucket(handle_of(bucket), CPU)
    first += 1
    second = copy_bucket(handle_of(bucket), CPU)
    bucket.release()
    assert second.float().tolist() == VALUES


def test_a_borrower_that_dies_leaves_the_memory_to_the_lender() -> None:
    bucket = share_bucket(SPECS, PARTS)
    borrower = get_context("fork").Process(target=Borrower().die_after_reading, args=(handle_of(bucket),))
    borrower.start()
    borrower.join(120)
    assert borrower.exitcode == 1
    assert copy_bucket(handle_of(bucket), CPU).float().tolist() == VALUES
    bucket.release()


def test_a_lender_that_is_killed_leaves_no_segment() -> None:
    code = (
        "from weight_borrowers import Lender; import time; print(Lender().lend([1.0, 2.0]), flush=True); "
        "time.sleep(3600)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{HELPERS}"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as lender:
        assert lender.stdout is not None
        path = lender.stdout.readline().split("'")[1]
        assert Path(path).exists()
        lender.kill()


def test_a_part_that_fails_takes_the_memory_back() -> None:
    def parts() -> Iterator[torch.Tensor]:
        yield PARTS[0]
        raise ArithmeticError("gathering failed")

    with pytest.raises(ArithmeticError, match="gathering failed"):
        share_bucket(SPECS, parts())


def test_no_room_is_said_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_bucket.os, "posix_fallocate", refuse)
    with pytest.raises(
        ValueError, match=r"room for a bucket of .*No space left.*update_weights_bucket_megabytes, or"
    ):
        share_bucket(SPECS, PARTS)


def test_a_device_without_an_offer_is_named() -> None:
    handle = BucketHandle(SPECS, {"GPU-1": CudaIpcHandle(())})
    with pytest.raises(ValueError, match=r"own device cpu@.*offered on \['GPU-1'\].*backend=broadcast"):
        copy_bucket(handle, CPU)


def test_offers_of_all_ranks_make_one_handle() -> None:
    places = ({"GPU-1": CudaIpcHandle((1,))}, {}, {"GPU-2": CudaIpcHandle((2,))})
    merged = BucketHandle.merged([BucketHandle(SPECS, place) for place in places])
    assert merged == BucketHandle(SPECS, {"GPU-1": CudaIpcHandle((1,)), "GPU-2": CudaIpcHandle((2,))})
    assert merged.num_elements == 7


@pytest.mark.parametrize(
    ("ranks", "engines", "expected"),
    [
        (["g0", "g1", "g2"], ["g0", "g2"], [True, False, True]),
        (["cpu@x", "cpu@x"], ["cpu@x", "cpu@x"], [True, False]),
        (["cpu@x", "cpu@y", "cpu@y"], ["cpu@y"], [False, True, False]),
    ],
)
def test_one_rank_offers_on_every_engine_device(
    ranks: list[str], engines: list[str], expected: list[bool]
) -> None:
    assert choose_offering_ranks(ranks, engines) == expected


def test_an_engine_without_a_rank_on_its_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend=ipc needs .* without a rank: \['g3'\]"):
        choose_offering_ranks(["g0", "g1"], ["g1", "g3"])


@pytest.mark.parametrize(
    ("variables", "written"),
    [
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True,pinned_use_x:1"},
            [
                "max_split_size_mb:512,expandable_segments:False,pinned_use_x:1",
                "max_split_size_mb:512,expandable_segments:True,pinned_use_x:1",
            ],
        ),
        (
            # PyTorch reads the first of both alone.
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments: True",
                "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:1",
            },
            ["expandable_segments: False", "expandable_segments: True"],
        ),
        (
            {
                "PYTORCH_ALLOC_CONF": "max_split_size_mb:1",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
            [],
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, []),
        ({}, []),
    ],
)
def test_the_allocators_other_settings_stay(
    variables: dict[str, str], written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", calls.append)
    with without_expandable_segments():
        assert calls == written[:1]
    assert calls == written


def test_nodes_of_one_host_name_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    key = shared_bucket.device_key(CPU)
    assert key == shared_bucket.device_key(CPU)
    monkeypatch.setattr(shared_bucket, "_SHARED_MEMORY_FOLDER", Path("/proc"))
    assert shared_bucket.device_key(CPU) != key
