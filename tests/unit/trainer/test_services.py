"""Services do not change while a run lasts, what does is in ``RunState``; a run that is asked to end ends
after its step."""

import ast
import dataclasses
import functools
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import types
import typing
from typing import Any

import pytest

from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.config.processes import process_status
from verl_rc.metrics.sinks import Tracker
from verl_rc.records.dataset import PromptStream
from verl_rc.runtime.checkpoint import CheckpointStore
from verl_rc.trainer.cluster.engine_group import EngineGroup
from verl_rc.trainer.cluster.weight_transport import BroadcastTransport, IpcTransport, WeightTransport
from verl_rc.trainer.services import Services
from verl_rc.trainer.stop import StoppedByAlertError, StopRequest

MAY_CHANGE = {
    PromptStream: "its position is put into RunState.prompts at the end of every step",
    CheckpointStore: "the checkpoint that is being written is no part of itself",
    StopRequest: "a request to end concerns this process alone",
    EngineGroup: "what engines are built with, and what they were handed, is kept for others in their places",
    BroadcastTransport: "weights that engines have yet to load: a resumed run publishes anew",
    WeightTransport: "which engines have all weights: a resumed run starts with new ones",
    Tracker: "the step of the last alert: a resumed run may lack the token record of the step behind it",
    IpcTransport: "who lends to whom depends on the processes that are there",
}


def parts(annotation: Any) -> list[type]:
    """The classes of this project that a field may hold."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [part for option in typing.get_args(annotation) for part in parts(option)]
    own = isinstance(annotation, type) and annotation.__module__.startswith("verl_rc.")
    return [annotation] if own else []


def changes(kind: type) -> list[str]:
    """Methods that assign to a field of the object, or change what it holds in place."""
    found = []
    [body] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    for method in body.body:
        if isinstance(method, ast.FunctionDef) and method.name not in ("__init__", "__post_init__"):
            found += [f"{kind.__name__}.{method.name}" for node in ast.walk(method) if _changes_self(node)]
    return list(dict.fromkeys(found))


def _changes_self(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return any(_is_of_self(target) for target in node.targets)
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return _is_of_self(node.target)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("append", "extend", "update", "pop", "clear", "add") and _is_of_self(
            node.func.value
        )
    return False


def _is_of_self(target: ast.AST) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return any(map(_is_of_self, target.elts))
    while isinstance(target, ast.Subscript | ast.Attribute):
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            return target.value.id == "self"
        target = target.value
    return False


def test_services_are_frozen_and_hold_nothing_that_changes() -> None:
    assert Services.__dataclass_params__.frozen  # type: ignore[attr-defined]
    hints = typing.get_type_hints(Services)
    kinds = {kind for one in dataclasses.fields(Services) for kind in parts(hints[one.name])} | {
        BroadcastTransport,
        IpcTransport,
    }
    assert len(kinds) > 12
    assert not {kind: found for kind in kinds - MAY_CHANGE.keys() if (found := changes(kind))}
    assert MAY_CHANGE.keys() <= {kind for kind in kinds if changes(kind)}  # no exception without need


class Planted:
    def count(self) -> None:
        self.total: int = 1

    def add(self) -> None:
        self.total += 1

    def exchange(self) -> None:
        self.one, _other = 1, 2

    def put(self) -> None:
        self.table["key"].value = 1

    def keep(self) -> None:
        self.items.append(1)

    def ask(self) -> int:
        total = self.total
        return total + len(self.items)


@pytest.mark.parametrize("method", ["count", "add", "exchange", "put", "keep"])
def test_the_check_itself(method: str) -> None:
    found = changes(Planted)
    assert f"Planted.{method}" in found
    assert "Planted.ask" not in found


def test_sigterm_at_the_start_gives_back_the_folder_and_ends_what_was_started() -> None:
    code = """
import os, signal, subprocess, time
from verl_rc.trainer.stop import ending_on_sigterm
with ending_on_sigterm(lambda: print("given back", flush=True)):
    print(subprocess.Popen(["sh", "-c", "sleep 600; :"]).pid, flush=True)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    except BaseException:
        pass
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid, given_back = ended.stdout.split("\n")[:2]
    assert (ended.returncode, given_back) == (143, "given back")
    status = process_status(int(pid))
    assert status is None or status[0] == "Z"


def test_the_first_sigterm_is_noted_and_the_second_ends() -> None:
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest()
    with request.listening():
        assert not request.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.requested
        with pytest.raises(SystemExit) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
        assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_asks_to_end_does_so_after_its_step_whatever_the_scheduler_asks() -> None:
    request = StopRequest()
    request.end_if_accepted()
    with request.listening():
        request.request("the reward has collapsed")
        os.kill(os.getpid(), signal.SIGTERM)
    request.accept()
    with pytest.raises(StoppedByAlertError, match="the reward has collapsed"):
        request.end_if_accepted()


def test_a_scheduler_gets_its_exit_code() -> None:
    request = StopRequest()
    request.requested = True
    request.end_if_accepted()  # too late for this step
    request.accept()
    with pytest.raises(SystemExit) as raised:
        request.end_if_accepted()
    assert raised.value.code == 143


@pytest.mark.parametrize(
    ("save_freq", "every", "saved"),
    [(3, 1, [3, 6, 7]), (3, 2, [4, 7]), (7, 1, [7]), (100, 1, [7]), (0, 1, []), (-1, 2, [])],
)
def test_steps_that_a_checkpoint_is_due_at(save_freq: int, every: int, saved: list[int]) -> None:
    """With a frequency <= 0 none is, the last step's neither."""
    asynchrony = AsyncTrainingConfig(trigger_parameter_sync_step=every)
    config = types.SimpleNamespace(
        trainer=types.SimpleNamespace(save_freq=save_freq), async_training=asynchrony
    )
    services: Any = types.SimpleNamespace(config=config, total_steps=7)
    services.is_due = functools.partial(Services.is_due, services)
    assert [step for step in range(1, 8) if Services.saves_at(services, step)] == saved
