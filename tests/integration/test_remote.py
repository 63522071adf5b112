"""What the driver learns from a process that fails: who, what, the traceback, and the cause."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_rc.cluster.ray_session import start_ray
from verl_rc.cluster.remote import RemoteError, RemoteProcess, wait_for_all
from verl_rc.config.trainer import RayInitConfig

FAILING = """
import os, time

class Failing:
    def complain(self, text):
        raise ValueError(text)

    def die(self):
        os._exit(1)

    def linger(self):
        time.sleep(60)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteProcess]:
    import ray

    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    start_ray(RayInitConfig(), processes=1)
    process = RemoteProcess("worker 3", {})
    wait_for_all([process.build("failing:Failing")])
    yield process
    ray.shutdown()


def test_every_kind_of_failure_names_who_and_what(process: RemoteProcess) -> None:
    with pytest.raises(RemoteError, match=r"worker 3 failed to complain:[\s\S]*ValueError: not like this$") as caught:
        wait_for_all([process.call("complain", "not like this")])
    assert isinstance(caught.value.cause, ValueError)
    assert str(caught.value.cause) == "not like this"
    started = time.monotonic()
    with pytest.raises(RemoteError, match=r"did not answer within 1 s: worker 3 \(linger\)"):
        wait_for_all([process.call("linger")], timeout_seconds=1)
    assert time.monotonic() - started < 30
    process.kill()
    with pytest.raises(RemoteError, match="worker 3 died while it was to complain"):
        wait_for_all([process.call("complain", "too late")])
