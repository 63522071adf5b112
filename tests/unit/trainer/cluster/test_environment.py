"""Whose environment variables count, and what a process says when its object cannot be built."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from verl_rc.runtime.workers.environment import engine_environment, trainer_environment
from verl_rc.trainer.cluster import remote


def test_the_users_log_level_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """B8: the first start on a new machine must be watched."""
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    quiet = engine_environment(1, "cuda", one_node=True)
    assert (quiet["VLLM_LOGGING_LEVEL"], quiet["VLLM_PLUGINS"]) == ("ERROR", "")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    loud = engine_environment(1, "cuda", one_node=True)
    assert (loud["VLLM_LOGGING_LEVEL"], loud["VLLM_PLUGINS"]) == ("DEBUG", "mine")


def test_kernels_that_do_not_depend_on_the_batch_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """C5: where the driver's environment has it, engines on all nodes get it."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert engine_environment(1, "cuda", one_node=False)["VLLM_BATCH_INVARIANT"] == "1"


def test_both_ends_of_a_transfer_agree_on_how_nccl_takes_memory() -> None:
    """D3: vLLM switches it off, and a sender that had it on would hang."""
    ends = (trainer_environment(1, one_node=True), engine_environment(1, "cuda", one_node=True))
    assert [end["NCCL_CUMEM_ENABLE"] for end in ends] == ["0", "0"]


def test_the_error_of_a_failed_start_ends_with_what_the_process_wrote(tmp_path: Path) -> None:
    """B8: a library may say in its log alone what went wrong."""
    process_class = remote._Process.__ray_metadata__.modified_class
    process = process_class.__new__(process_class)
    with errors_written_to(tmp_path / "worker.err"):
        os.write(2, b"CUDA error: no kernel image is available\n")
        with pytest.raises(TypeError) as caught:
            process._build("builtins:int", {"no_such": 1})
    (note,) = caught.value.__notes__
    assert note == f"The last lines of {tmp_path / 'worker.err'}:\nCUDA error: no kernel image is available"


@contextmanager
def errors_written_to(path: Path) -> Iterator[None]:
    """As Ray does it: what libraries write to this process's standard error goes to the file."""
    kept = os.dup(2)
    with path.open("w") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
