"""What the driver learns from a process that fails: who, what, the traceback, and the cause."""

import pytest
from small_processes import start_small_processes

from verl_rc.runtime.distributed.child_process import RemoteError
from verl_rc.trainer.cluster.remote import RemoteProcess, wait_for_all


@pytest.mark.usefixtures("ray_here")
def test_every_kind_of_failure_names_who_and_what() -> None:
    (process,) = start_small_processes("worker 3")
    with pytest.raises(
        RemoteError, match=r"worker 3 failed to complain:[\s\S]*ValueError: not like this$"
    ) as caught:
        wait_for_all([process.call("complain", "not like this")])
    assert isinstance(caught.value.cause, ValueError)
    assert str(caught.value.cause) == "not like this"
    with pytest.raises(RemoteError, match=r"did not answer within 1 s: worker 3 \(nap\)"):
        wait_for_all([process.call("nap")], timeout_seconds=1)
    process.kill()
    with pytest.raises(RemoteError, match="worker 3 died while it was to complain"):
        wait_for_all([process.call("complain", "too late")])


@pytest.mark.usefixtures("ray_here")
def test_a_process_has_its_threads_because_torch_comes_after_its_environment() -> None:
    process = RemoteProcess("rank 0", {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"})
    wait_for_all([process.build("small_processes:SmallProcess")])
    assert wait_for_all([process.call("threads")]) == [2]
    process.kill()
