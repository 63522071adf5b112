"""Reward functions that are an ``async def``, in real processes: one event loop, overlapping calls, a time
limit for each."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_rc.algorithm.rewards import RewardError, RewardOutput, RewardSample
from verl_rc.config.task import RewardConfig
from verl_rc.runtime.workers import reward_pool
from verl_rc.runtime.workers.reward_pool import RewardPool

SOURCE = """
import asyncio, os, socket, threading, time
from pathlib import Path

lock, slots = asyncio.Lock(), asyncio.Semaphore(2)
streams = beats = None
under_way, arrived, everyone = 0, 0, None

def serve(listener):  # echoes lines: in the place of a judge's server
    def answer(connection):
        with connection, connection.makefile("rwb") as stream:
            for line in stream:
                stream.write(line)
                stream.flush()
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

async def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    behaviour, _, argument = solution_str.partition(" ")
    return await globals()[behaviour](argument, Path(folder))

async def score(argument, folder):
    return {"score": float(argument), "process": os.getpid()}

async def judge(argument, folder):  # keeps a connection
    global streams
    async with lock:
        if streams is None:
            listener = socket.create_server(("127.0.0.1", 0))
            threading.Thread(target=serve, args=(listener,), daemon=True).start()
            streams = await asyncio.open_connection(*listener.getsockname())
        reader, writer = streams
        writer.write(argument.encode() + b"\\n")
        await writer.drain()
        return {"score": float(await reader.readline()), "process": os.getpid()}

async def limited(argument, folder):
    async with slots:
        await asyncio.sleep(0)
        return float(argument)

async def meet(argument, folder):  # ends once so many calls are under way
    global arrived, everyone
    everyone = everyone or asyncio.Event()
    arrived += 1
    if arrived == int(argument):
        everyone.set()
    await everyone.wait()
    return float(arrived)

async def crowd(argument, folder):
    global under_way
    under_way += 1
    for _ in range(20):
        await asyncio.sleep(0)
    score, under_way = float(under_way), under_way - 1
    return score

async def hang(argument, folder):
    await asyncio.Event().wait()

async def block(argument, folder):
    while True:
        pass

async def leave(argument, folder):
    await asyncio.sleep(0)
    os._exit(int(argument))

async def own_timeout(argument, folder):
    raise asyncio.TimeoutError("of the judge")

async def sys_exit(argument, folder):
    raise SystemExit(3)

async def exit_elsewhere(argument, folder):
    task = asyncio.create_task(sys_exit(argument, folder))
    await asyncio.wait([task])
    return float(argument)

async def beat(argument, folder):  # works on after the call, until the end
    global beats
    async def work():
        try:
            while True:
                (folder / "beats").write_text("beat")
                await asyncio.sleep(0.01)
        finally:
            (folder / "ended").write_text("in order")
    beats = asyncio.create_task(work())
    return 1.0

def sometimes(solution_str, **_):  # no async def, and yet to be awaited
    return score(solution_str, None) if solution_str == "2" else float(solution_str)
"""


@pytest.fixture
def open_pool(tmp_path: Path) -> Iterator[Callable[..., RewardPool]]:
    (tmp_path / "mine.py").write_text(SOURCE)
    pools = []

    def make(name: str = "compute_score", **fields: object) -> RewardPool:
        custom = {"path": str(tmp_path / "mine.py"), "name": name, "reward_kwargs": {"folder": str(tmp_path)}}
        options = {"num_workers": 1, "timeout_seconds": 600, "custom_reward_function": custom, **fields}
        pools.append(RewardPool(RewardConfig.model_validate(options), start_timeout_seconds=600))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def results_of(pool: RewardPool, *texts: str) -> list[RewardOutput | RewardError]:
    samples = [RewardSample(100 + index, "mine", "truth", {}, text) for index, text in enumerate(texts)]
    results = dict(pool.results(samples))
    return [results[place] for place in range(len(texts))]


def scores_of(pool: RewardPool, *texts: str) -> list[float]:
    results = results_of(pool, *texts)
    assert all(isinstance(result, RewardOutput) for result in results), results
    return [result.score for result in results if isinstance(result, RewardOutput)]


@pytest.mark.parametrize("max_concurrent", [1, 4])
@pytest.mark.parametrize("behaviour", ["judge", "limited"])
def test_what_a_call_keeps_serves_the_next_ones(
    open_pool: Callable[..., RewardPool], behaviour: str, max_concurrent: int
) -> None:
    pool = open_pool(max_concurrent=max_concurrent)
    for _ in range(2):
        assert scores_of(pool, *(f"{behaviour} {number}" for number in range(9))) == list(range(9))


def test_calls_overlap_up_to_the_limit(open_pool: Callable[..., RewardPool]) -> None:
    assert scores_of(open_pool(max_concurrent=3), *["meet 3"] * 3) == [3, 3, 3]
    peaks = [max(scores_of(open_pool(max_concurrent=most), *["crowd"] * 12)) for most in (1, 4)]
    assert peaks == [1, 4]


def test_samples_are_shared_among_the_processes(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool(num_workers=2, max_concurrent=8)
    deadline, seen = time.monotonic() + 120, 0
    while seen < 2:  # until both have started
        assert time.monotonic() < deadline, "one process gets all samples"
        results = results_of(pool, "score 1", "score 2")
        seen = len({result.extras["process"] for result in results if isinstance(result, RewardOutput)})


@pytest.mark.parametrize("max_concurrent", [1, 4])
def test_a_late_call_is_cancelled_and_what_the_process_keeps_stays(
    open_pool: Callable[..., RewardPool], max_concurrent: int
) -> None:
    pool = open_pool(max_concurrent=max_concurrent, timeout_seconds=3)
    before, late, after = results_of(pool, "judge 1", "hang", "judge 3")
    assert "the reward function did not return, it took longer than 3 s, for row 101 " in str(late)
    assert isinstance(before, RewardOutput)
    assert isinstance(after, RewardOutput)
    assert before.extras["process"] == after.extras["process"]
    assert scores_of(pool, "judge 4") == [4]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("leave 3", "the reward function did not return, its process ended with exit code 3, for row 102 "),
        pytest.param(
            "block",
            "the reward function did not return, it took longer than 3.5 s, for row 102 ",
            marks=pytest.mark.slow,
        ),
        ("own_timeout", "the reward function raised .*TimeoutError: of the judge .* for row 102 "),
        ("sys_exit", "the reward function raised SystemExit: 3 .* for row 102 "),
    ],
)
def test_a_call_that_fails_takes_no_other_with_it(
    open_pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch, behaviour: str, reason: str
) -> None:
    monkeypatch.setattr(reward_pool, "_CANCEL_SECONDS", 0.5)
    pool = open_pool(max_concurrent=4, timeout_seconds=3)
    *scored, failed, last = results_of(pool, "score 0", "score 1", behaviour, "score 3")
    assert [result.score for result in [*scored, last] if isinstance(result, RewardOutput)] == [0, 1, 3]
    assert isinstance(failed, RewardError)
    with pytest.raises(RewardError, match=reason):
        raise failed
    assert scores_of(pool, "score 1") == [1]


def test_a_task_that_exits_leaves_the_loop_to_the_others(open_pool: Callable[..., RewardPool]) -> None:
    assert scores_of(open_pool(max_concurrent=2), *(f"exit_elsewhere {n}" for n in range(4))) == [0, 1, 2, 3]


def test_the_loop_runs_between_calls_and_ends_in_order(
    open_pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    pool = open_pool()
    assert scores_of(pool, "beat") == [1]
    (tmp_path / "beats").unlink(missing_ok=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "beats").exists():
        assert time.monotonic() < deadline, "the loop stands still between calls"
        time.sleep(0.01)
    pool.close()
    assert (tmp_path / "ended").read_text() == "in order"


def test_an_answer_to_be_awaited_needs_no_async_def(open_pool: Callable[..., RewardPool]) -> None:
    assert scores_of(open_pool("sometimes"), "1", "2", "3") == [1, 2, 3]
