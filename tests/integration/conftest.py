"""A tiny model and task on disk, one Ray for small processes, and one real run (Ray, an fp32 vLLM engine, an
FSDP2 rank)."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from listening_sockets import family, listening
from real_runs import left_over_processes, of_folder, train
from real_steps import RealRun, open_faulty_run
from small_engines import start_small_engine
from small_runs import HELPERS, WITH_EVERYTHING, make_task, run_overrides, share_of_digits

from verl_rc.config.run import RayInitConfig
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.trainer.cluster.ray_session import start_ray

ACCURACY = "val-core/digits/acc/mean@1"
_RAY = ExitStack()
"""The Ray of ``ray_here``, then the run of ``faulty_run``."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process holds one Ray at a time, and starting one takes seconds: tests that share one run in
    succession, and last."""

    def turn(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        return 2 if "faulty_run" in names else int("ray_here" in names)

    items.sort(key=turn)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``model`` and ``data`` folders."""
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def overrides(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of ``whole_run``, but for its folder."""
    folder = tmp_path_factory.mktemp("reward")
    teacher = f"distillation.teacher_models.teacher_model.model_path={task['model']}"
    return [*run_overrides(task, folder / "nowhere"), share_of_digits(folder), teacher, *WITH_EVERYTHING]


@pytest.fixture(scope="session")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the processes of ``whole_run`` write down which keys they read."""
    return tmp_path_factory.mktemp("reads")


@pytest.fixture(scope="session")
def whole_run(overrides: list[str], reads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps with everything, as a user starts it; checkpoints of steps 2 and
    4."""
    folder = tmp_path_factory.mktemp("whole")
    more = ("trainer.report=at_end", "async_training.trace=True")
    result = train([*overrides, *of_folder(folder), *more], reads=reads)
    assert result.returncode == 0, result.stderr[-3000:]
    said = result.stdout.splitlines()
    drawn = said.index(f"training curves: {folder / 'training_curves.png'}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line[ACCURACY] for line in lines if ACCURACY in line]
    assert said[drawn + 1] == f"validation accuracy: {accuracies[0]:.3f} -> {accuracies[-1]:.3f}"
    assert said[-1] == f"report: {folder / 'report.html'}"
    assert "The run ended after 4 of 4 steps." in (folder / "report.html").read_text()
    assert (folder / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    assert not left_over_processes()
    return folder


@pytest.fixture(scope="session")
def small_engine(task: dict[str, Path]) -> Iterator[ChildProcess]:
    """An ``ObservedEngine`` of the task's model in float32. Its weights are those of the test before."""
    process = start_small_engine(task["model"], {"max_logprobs": 300})
    yield process
    process.end()


@pytest.fixture(scope="session")
def ray_here() -> Iterator[set[tuple[str, str]]]:
    """A Ray in this process, with room for three processes; its value are the sockets that listened here
    before.

    Its first start fails when its servers are up, as on a machine that is too busy.
    """
    import ray
    from ray._private import services

    before = listening(family(str(os.getpid())))
    get_node, failures = services.get_node, [Exception("The current node timed out during startup.")]

    def fails_once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return get_node(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", HELPERS, prepend=os.pathsep)
        patch.setattr(services, "get_node", fails_once)
        start_ray(RayInitConfig(), processes=3)
        assert not failures
        _RAY.callback(ray.shutdown)
        yield before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """Ray ends with the last test of this folder: tests of other folders end a Ray that they find in their
    process."""
    yield
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _RAY.close()


@pytest.fixture(scope="session")
def faulty_run(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """A real run whose workers can be told to go wrong; each test leaves it healthy."""
    _RAY.close()
    return _RAY.enter_context(open_faulty_run(task, tmp_path_factory.mktemp("faulty")))
