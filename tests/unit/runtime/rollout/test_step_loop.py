"""What the thread that owns the sampler does in which order, with a sampler that counts down."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.open_request import Box, OpenRequest
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.rollout.step_loop import StepLoop

OPTIONS = SamplingOptions(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=99, stop_token_ids=())
PATIENCE = 10.0


class Countdown:
    """A response has as many tokens as its request's ``max_tokens``. Every step waits until the test allows
    it."""

    def __init__(self, capacity: int, steps: threading.Semaphore) -> None:
        self.capacity, self.steps = capacity, steps
        self.left: dict[int, int] = {}
        self.length: dict[int, int] = {}
        self.log: list[Any] = []
        self.version = 0
        self.broken = False
        self.owner = threading.get_ident()
        self.versions: dict[int, list[int]] = {}
        """The version at every token so far, also of samples that were cut."""

    def begin(self, opened: OpenRequest) -> None:
        assert threading.get_ident() == self.owner
        key = opened.key
        self.length[key] = opened.request.request.max_tokens
        self.left[key] = self.length[key] - len(self.versions.setdefault(key, []))
        self.log.append(("begin", opened.request.number))

    def step(self, running: Mapping[int, OpenRequest]) -> list[tuple[OpenRequest, Any]]:
        assert threading.get_ident() == self.owner
        assert 0 < len(self.left) <= self.capacity
        self.steps.acquire()
        if self.broken:
            raise ArithmeticError("the step failed")
        self.log.append("step")
        self.left = {key: left - 1 for key, left in self.left.items()}
        for key in self.left:
            self.versions[key].append(self.version)
        ended = [key for key, left in self.left.items() if left == 0]
        for key in ended:
            del self.left[key]
        return [(running[key], self.response(key)) for key in ended]

    def response(self, key: int) -> Any:
        return self.length[key], self.version

    def cut(self, requests: Sequence[OpenRequest]) -> None:
        assert threading.get_ident() == self.owner
        for opened in requests:
            del self.left[opened.key]

    def drop(self, requests: Sequence[OpenRequest]) -> None:
        for opened in requests:
            self.left.pop(opened.key, None)
            self.versions.pop(opened.key, None)

    def so_far(self, opened: OpenRequest) -> tuple[int, tuple[int, ...]]:
        return opened.request.number, tuple(self.versions[opened.key])


class Labelled(Countdown):
    """A response is the version at each of its tokens."""

    def response(self, key: int) -> Any:
        return tuple(self.versions.pop(key))


def sample(number: int, length: int, has_priority: bool = False) -> Request:
    return Request(number, GenerationRequest([1], seed=number, max_tokens=length), OPTIONS, has_priority)


@pytest.fixture
def steps() -> threading.Semaphore:
    """One permission for every step."""
    return threading.Semaphore(0)


@pytest.fixture
def loops(steps: threading.Semaphore) -> Iterator[Callable[..., StepLoop[Countdown]]]:
    def make(
        capacity: int = 8, kind: type[Countdown] = Countdown, limit: int | None = None
    ) -> StepLoop[Countdown]:
        return StepLoop(partial(kind, capacity, steps), limit)

    yield make
    steps.release(1000)


def allow(steps: threading.Semaphore, count: int) -> None:
    """Let the sampler make so many steps, and wait until it has begun them."""
    steps.release(count)
    deadline = time.monotonic() + PATIENCE
    while steps._value and time.monotonic() < deadline:
        time.sleep(0.001)
    assert steps._value == 0


def log_of(loop: StepLoop[Countdown]) -> list[Any]:
    return loop.call(lambda sampler: list(sampler.log))


def test_what_is_handed_over_is_sampled_to_its_end_and_fetched_once(
    loops: Any, steps: threading.Semaphore
) -> None:
    loop, box = loops(), []
    loop.submit([sample(0, 3), sample(1, 1), sample(2, 2)], box)
    steps.release(3)
    assert loop.take(box, at_least=3, wait_seconds=PATIENCE) == [(1, (1, 0)), (2, (2, 0)), (0, (3, 0))]
    assert loop.take(box, at_least=1, wait_seconds=0.01) == []
    assert log_of(loop) == [("begin", 0), ("begin", 1), ("begin", 2), "step", "step", "step"]


def test_from_the_first_response_on_the_rest_is_waited_for_no_longer_than_the_linger(
    loops: Any, steps: threading.Semaphore
) -> None:
    """The others never end."""
    loop, box = loops(), []
    assert loop.take(box, at_least=3, wait_seconds=0.01, linger_seconds=1e9) == []
    loop.submit([sample(0, 1), sample(1, 9), sample(2, 9)], box)
    steps.release(1)
    assert loop.take(box, at_least=3, wait_seconds=1e6, linger_seconds=0.01) == [(0, (1, 0))]


def test_samples_that_come_later_join_the_others(loops: Any, steps: threading.Semaphore) -> None:
    loop, box, other = loops(), [], []
    loop.submit([sample(0, 3)], box)
    allow(steps, 1)
    loop.submit([sample(1, 1)], other)
    steps.release(2)
    assert loop.take(other, wait_seconds=PATIENCE) == [(1, (1, 0))]
    assert loop.take(box, wait_seconds=PATIENCE) == [(0, (3, 0))]
    assert [item for item in log_of(loop) if item != "step"] == [("begin", 0), ("begin", 1)]
    assert log_of(loop).count("step") == 3


def test_no_more_than_fit_are_under_way_and_the_lowest_number_begins_first(
    loops: Any, steps: threading.Semaphore
) -> None:
    loop, box = loops(capacity=2), []
    loop.call(lambda _: None, hold="test")
    loop.submit([sample(7, 1), sample(3, 2), sample(5, 1)], box)
    loop.submit([sample(4, 1)], box)
    loop.call(lambda _: None, release="test")
    steps.release(3)
    assert sorted(loop.take(box, at_least=4, wait_seconds=PATIENCE)) == [
        (3, (2, 0)),
        (4, (1, 0)),
        (5, (1, 0)),
        (7, (1, 0)),
    ]
    begun = [("begin", 3), ("begin", 4), "step", ("begin", 5), "step", ("begin", 7), "step"]
    assert log_of(loop) == begun


def test_new_samples_wait_for_the_end_of_others_and_what_was_cut_does_not(
    loops: Any, steps: threading.Semaphore
) -> None:
    """Nor do samples with priority. A lower number that comes later begins next."""
    loop, box, other = loops(limit=2), [], []
    steps.release(1000)
    loop.call(lambda _: loop.limit(1))
    loop.submit([sample(4, 3), sample(5, 4), sample(6, 1)], box)
    loop.call(loop.cut, after="all")
    loop.submit([sample(3, 1)], box)
    loop.submit([sample(0, 1, has_priority=True)], other)
    assert [number for number, _ in loop.take(other, 1, PATIENCE)] == [0]
    loop.call(lambda _: loop.limit(1000))
    assert [number for number, _ in loop.take(box, 4, PATIENCE)] == [4, 5, 3, 6]
    begun = [number for _, number in (item for item in log_of(loop) if item != "step")]
    assert begun == [4, 5, 0, 4, 5, 3, 6]


def test_samples_ahead_let_what_has_begun_go_on_and_hold_the_rest_back(
    loops: Any, steps: threading.Semaphore
) -> None:
    loop, training, validation = loops(capacity=2), [], []
    loop.submit([sample(number, 3) for number in range(3)], training)
    allow(steps, 1)
    loop.submit([sample(90, 1, has_priority=True), sample(91, 3, has_priority=True)], validation)
    steps.release(100)
    assert len(loop.take(validation, at_least=2, wait_seconds=PATIENCE)) == 2
    assert len(loop.take(training, at_least=3, wait_seconds=PATIENCE)) == 3
    log = log_of(loop)
    assert [number for _, number in (item for item in log if item != "step")] == [0, 1, 90, 91, 2]
    assert (
        log[: log.index(("begin", 2))].count("step") == 6
    )  # three of those that had begun, three of the longest one ahead


def test_a_call_is_carried_out_between_two_steps(loops: Any, steps: threading.Semaphore) -> None:
    loop, box = loops(), []
    loop.submit([sample(0, 3)], box)
    allow(steps, 1)
    caller = threading.Thread(target=lambda: loop.call(lambda sampler: sampler.log.append("called")))
    caller.start()
    while not loop._commands:
        time.sleep(0.001)
    allow(steps, 1)
    caller.join(PATIENCE)
    steps.release()
    assert loop.take(box, wait_seconds=PATIENCE) == [(0, (3, 0))]
    assert log_of(loop) == [("begin", 0), "step", "step", "called", "step"]


def test_a_call_that_wants_it_empty_waits_for_all_before_it_and_holds_back_all_after_it(
    loops: Any, steps: threading.Semaphore
) -> None:
    """16 under way and 4 that wait for room, then a new version, then 3 more: none is lost, and each has one
    version."""
    loop, box = loops(capacity=16), []
    loop.submit([sample(number, 1 + number % 5) for number in range(20)], box)
    allow(steps, 1)

    def publish(sampler: Countdown) -> None:
        assert not sampler.left
        sampler.version = 1

    publishing = threading.Thread(target=partial(loop.call, publish, after="all"))
    publishing.start()
    while not loop._commands:  # the publication must come before the samples
        time.sleep(0.001)
    loop.submit([sample(number, 1) for number in (20, 21, 22)], box)
    steps.release(100)
    ended = dict(loop.take(box, at_least=23, wait_seconds=PATIENCE))
    publishing.join()
    assert {number: version for number, (_, version) in ended.items()} == {n: int(n >= 20) for n in range(23)}
    assert all(length == 1 + number % 5 for number, (length, _) in ended.items() if number < 20)


def test_no_step_is_made_between_the_beginning_and_the_end_of_an_update(
    loops: Any, steps: threading.Semaphore
) -> None:
    loop, box = loops(), []
    steps.release(100)
    loop.call(lambda _: None, after="all", hold="weights")
    loop.submit([sample(0, 1)], box)
    loop.call(lambda _: None, hold="memory")
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda _: 1 // 0, release="weights")
    loop.call(lambda _: None, release="memory")
    assert loop.take(box, wait_seconds=0.05) == []
    loop.call(lambda _: None, after="all")  # what may not begin is not waited for
    loop.call(lambda _: None, release="weights")
    assert loop.take(box, wait_seconds=PATIENCE) == [(0, (1, 0))]


def test_an_action_that_fails_is_its_callers_error_and_the_loop_goes_on(
    loops: Any, steps: threading.Semaphore
) -> None:
    loop, box = loops(), []
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda _: 1 // 0)
    loop.submit([sample(0, 1)], box)
    steps.release()
    assert loop.take(box, wait_seconds=PATIENCE) == [(0, (1, 0))]


def test_a_step_that_fails_is_the_error_of_every_call_from_then_on(
    loops: Any, steps: threading.Semaphore
) -> None:
    loop, box = loops(), []
    loop.call(lambda sampler: setattr(sampler, "broken", True))
    loop.submit([sample(0, 1)], box)
    waiting: list[BaseException] = []

    def wait_for(work: Callable[[], Any]) -> threading.Thread:
        def remember() -> None:
            try:
                work()
            except ArithmeticError as error:
                waiting.append(error)

        thread = threading.Thread(target=remember)
        thread.start()
        return thread

    threads = [wait_for(lambda: loop.take(box)), wait_for(lambda: loop.call(lambda _: None, after="all"))]
    time.sleep(0.05)
    steps.release()
    for thread in threads:
        thread.join(PATIENCE)
    assert [str(error) for error in waiting] == ["the step failed"] * 2
    for call in (lambda: loop.submit([], box), lambda: loop.take(box), lambda: loop.call(lambda _: None)):
        with pytest.raises(ArithmeticError, match="the step failed"):
            call()


def test_what_building_raises_is_raised_where_the_loop_is_made() -> None:
    def build() -> Countdown:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        StepLoop(build)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exit_asked_for_in_an_action_ends_the_thread_and_the_call(loops: Any) -> None:
    def leave(_: Countdown) -> None:
        raise SystemExit("enough")

    loop = loops()
    with pytest.raises(SystemExit, match="enough"):
        loop.call(leave)
    with pytest.raises(SystemExit, match="enough"):
        loop.call(lambda _: None)
    loop._thread.join(PATIENCE)
    assert not loop._thread.is_alive()


def test_nothing_to_do_costs_nothing(loops: Any) -> None:
    loop = loops()
    used = time.clock_gettime_ns(time.pthread_getcpuclockid(loop._thread.ident))
    time.sleep(0.3)
    assert time.clock_gettime_ns(time.pthread_getcpuclockid(loop._thread.ident)) - used < 10_000_000


def test_a_thousand_samples_from_many_threads_each_end_once(loops: Any, steps: threading.Semaphore) -> None:
    loop = loops(capacity=64)
    steps.release(100_000)
    boxes: list[Box] = [[] for _ in range(8)]

    def hand_over(which: int) -> None:
        for number in range(which, 1000, 8):
            loop.submit([sample(number, 1 + number % 7)], boxes[which])

    threads = [threading.Thread(target=hand_over, args=(which,)) for which in range(8)]
    for thread in threads:
        thread.start()
    ended = [item for box in boxes for item in loop.take(box, at_least=125, wait_seconds=PATIENCE)]
    for thread in threads:
        thread.join()
    assert sorted(ended) == [(number, (1 + number % 7, 0)) for number in range(1000)]


def cut_and_publish(loop: StepLoop[Countdown], version: int, **options: Any) -> dict[int, Any]:
    """A weight update under running samples; returns the responses so far."""

    def publish(sampler: Countdown) -> dict[int, Any]:
        loop.cut(sampler)
        sampler.version = version
        return dict(loop.so_far(sampler))

    return loop.call(publish, **options)


def after_steps(loop: StepLoop[Countdown], count: int) -> None:
    """Let samples without priority be decoded in exactly so many further steps, and wait for the last one."""
    loop.call(lambda _: loop.limit(count))
    loop.call(lambda _: None, after="all")


def test_an_update_cuts_what_runs_and_loses_nothing(loops: Any, steps: threading.Semaphore) -> None:
    """T7: 16 under way, 4 wait for room; each is as long as it was to be, with tokens of both versions in
    order."""
    loop, box = loops(16, Labelled), []
    steps.release(1000)
    loop.call(lambda _: loop.limit(0))
    loop.submit([sample(number, 4 + number % 5) for number in range(20)], box)
    after_steps(loop, 3)
    assert cut_and_publish(loop, 1) == dict.fromkeys(range(16), (0, 0, 0))
    after_steps(loop, 100)
    ended = dict(loop.take(box, at_least=20, wait_seconds=PATIENCE))
    assert ended == {
        n: (0,) * (3 if n < 16 else 0) + (1,) * (4 + n % 5 - (3 if n < 16 else 0)) for n in range(20)
    }
    begun = [item[1] for item in log_of(loop) if item != "step"]
    assert begun[:32] == [*range(16), *range(16)]  # what was cut goes on in its order, before others begin


def test_samples_with_priority_are_not_cut(loops: Any, steps: threading.Semaphore) -> None:
    loop, training, validation = loops(4, Labelled), [], []
    steps.release(1)
    loop.call(lambda _: loop.limit(1))
    loop.submit([sample(0, 9), sample(1, 9)], training)
    loop.call(lambda _: None, after="all")
    loop.submit([sample(0, 4, has_priority=True), sample(1, 2, has_priority=True)], validation)
    publishing = threading.Thread(target=partial(cut_and_publish, loop, 1, after="priority"))
    publishing.start()
    while not any(command.after == "priority" for command in list(loop._commands)):
        time.sleep(0.001)
    steps.release(1000)
    assert sorted(loop.take(validation, at_least=2, wait_seconds=PATIENCE)) == [
        (0, (0, 0, 0, 0)),
        (1, (0, 0)),
    ]
    publishing.join(PATIENCE)
    after_steps(loop, 100)
    expected = (0,) * 5 + (1,) * 4  # one step by themselves, four beside the others
    assert loop.take(training, at_least=2, wait_seconds=PATIENCE) == [(0, expected), (1, expected)]


def test_a_sample_that_ends_before_an_update_is_not_among_those_it_cuts(
    loops: Any, steps: threading.Semaphore
) -> None:
    loop, box = loops(4, Labelled), []
    steps.release(1000)
    loop.call(lambda _: loop.limit(0))
    loop.submit([sample(0, 2), sample(1, 3)], box)
    after_steps(loop, 2)
    assert cut_and_publish(loop, 1) == {1: (0, 0)}
    after_steps(loop, 2)
    assert loop.take(box, at_least=2, wait_seconds=PATIENCE) == [(0, (0, 0)), (1, (0, 0, 1))]


def test_two_hundred_updates_under_load_interrupt_nothing(loops: Any, steps: threading.Semaphore) -> None:
    """T25: versions only rise within a response, every token is there, and nothing comes twice."""
    loop, box = loops(16, Labelled), []
    steps.release(1_000_000)
    loop.call(lambda _: loop.limit(0))
    loop.submit([sample(number, 150 + number % 37) for number in range(64)], box)
    for version in range(1, 201):
        after_steps(loop, 1 + version % 3)
        cut_and_publish(loop, version)
    loop.call(lambda _: loop.limit(10_000))
    ended = loop.take(box, at_least=64, wait_seconds=PATIENCE)
    assert sorted(number for number, _ in ended) == list(range(64))
    for number, versions in ended:
        assert len(versions) == 150 + number % 37
        assert list(versions) == sorted(versions)
        assert max(Counter(versions[:-1]).values()) <= 3 or versions[-1] == 200
    assert {version for _, versions in ended for version in versions} == set(range(201))


def test_steps_are_limited_and_what_is_required_is_sampled_to_its_end(
    loops: Any, steps: threading.Semaphore
) -> None:
    loop, box = loops(8, Labelled), []
    steps.release(1000)
    loop.call(lambda _: loop.limit(3))
    loop.submit([sample(number, 2 + 3 * number) for number in range(4)], box)  # 2, 5, 8, 11 tokens
    assert (
        loop.call(lambda sampler: sampler.log.count("step"), after="all") == 3
    )  # waits for the steps, not for the samples
    assert loop.take(box, wait_seconds=PATIENCE) == [(0, (0, 0))]
    loop.call(lambda _: loop.require([0, 2]))  # 0 has ended
    assert [number for number, _ in loop.take(box, at_least=2, wait_seconds=PATIENCE)] == [1, 2]
    assert loop.call(lambda sampler: sampler.log.count("step"), after="all") == 8
    assert cut_and_publish(loop, 1, after="all") == {3: (0,) * 8}
    assert loop.take(box, wait_seconds=0.02) == []
    after_steps(loop, 2)
    assert loop.call(lambda sampler: sampler.versions[3]) == [0] * 8 + [1] * 2
    assert log_of(loop).count("step") == 10


def test_samples_with_priority_are_sampled_beyond_the_limit_and_by_themselves(
    loops: Any, steps: threading.Semaphore
) -> None:
    loop, training, validation = loops(8, Labelled), [], []
    steps.release(1000)
    loop.call(lambda _: loop.limit(0))
    loop.submit([sample(0, 3)], training)
    loop.submit([sample(0, 5, has_priority=True)], validation)
    assert loop.take(validation, wait_seconds=PATIENCE) == [(0, (0,) * 5)]
    assert [item for item in log_of(loop) if item != "step"] == [("begin", 0)]
    after_steps(loop, 3)
    assert loop.take(training, wait_seconds=PATIENCE) == [(0, (0, 0, 0))]
    assert log_of(loop).count("step") == 8


def limited_run(loop: StepLoop[Countdown], wait: Callable[[], None]) -> list[Any]:
    """Five versions of seven steps each; ``wait`` passes time between commands. Returns what was cut, and
    what ended, of each."""
    box: Box = []
    found = []
    loop.call(lambda _: loop.limit(0))
    for version in range(5):
        cut = cut_and_publish(loop, version, after="all")
        wait()
        loop.submit([sample(3 * version + place, 4 + 5 * place + version) for place in range(3)], box)
        loop.call(lambda _: loop.limit(7))
        wait()
        loop.call(lambda _, first=3 * version: loop.require([first, first + 1]))
        wait()
        loop.call(lambda _: loop.limit(0), after="all")
        found.append((cut, sorted(loop.take(box, at_least=0))))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_with_a_limit_of_steps_it_does_not_matter_when_commands_come(
    loops: Any, steps: threading.Semaphore, seed: int
) -> None:
    steps.release(100_000)
    moments = random.Random(seed)
    found = limited_run(loops(4, Labelled), lambda: time.sleep(moments.random() / 200))
    assert found == limited_run(loops(4, Labelled), lambda: None)
    assert any(len(set(versions)) > 1 for _, ended in found for _, versions in ended)


def test_what_is_cancelled_is_sampled_no_further_and_frees_its_place(
    loops: Any, steps: threading.Semaphore
) -> None:
    loop, box, validation = loops(3, Labelled), [], []
    steps.release(1000)
    loop.call(lambda _: loop.limit(0))
    loop.submit([sample(number, 3 + 10 * (number == 1)) for number in range(6)], box)
    after_steps(loop, 1)
    cut_and_publish(loop, 1)
    after_steps(loop, 1)
    loop.submit([sample(1, 2, has_priority=True)], validation)  # of another caller, with a number of its own
    loop.call(lambda sampler: loop.cancel(sampler, [1, 2, 4, 99]))  # 0, 1, 2 run, 3, 4, 5 wait
    after_steps(loop, 10)
    assert sorted(loop.take(box, at_least=3, wait_seconds=PATIENCE)) == [
        (0, (0, 1, 1)),
        (3, (1,) * 3),
        (5, (1,) * 3),
    ]
    assert loop.take(validation, wait_seconds=PATIENCE) == [(1, (1, 1))]
    assert not loop.call(lambda sampler: sampler.left or sampler.versions)
    assert not loop._waiting


def test_what_is_cancelled_does_not_wait_for_an_update_that_waits_for_it(
    loops: Any, steps: threading.Semaphore
) -> None:
    """Also when it was submitted behind the update, and is not in the loop yet."""
    loop, box = loops(4, Labelled), []
    loop.submit([sample(0, 1), sample(1, 1000)], box)

    def publish(sampler: Countdown) -> None:
        assert not sampler.left
        sampler.version = 1

    published = loop.post(publish, after="all")
    loop.submit([sample(2, 2), sample(3, 2)], box)
    steps.release(20)
    assert loop.take(box, wait_seconds=PATIENCE) == [(0, (0,))]
    cancelled = loop.post(lambda sampler: loop.cancel(sampler, [1, 2]), overtakes=True)
    steps.release(20)
    cancelled.result(PATIENCE)
    published.result(PATIENCE)
    assert loop.take(box, wait_seconds=PATIENCE) == [(3, (1, 1))]
    loop.submit(
        [sample(2, 1)], box
    )  # nothing is queued any more: a number that comes again is another sample
    assert loop.take(box, wait_seconds=PATIENCE) == [(2, (1,))]
    assert not loop.call(lambda sampler: sampler.left)


def test_a_call_that_comes_with_an_answer_that_ends_the_loop_is_told_so() -> None:
    reply: Future[str] = Future()

    class Waiting(Countdown):
        """Its requests wait for ``reply``."""

        def begin(self, opened: OpenRequest) -> Any:
            return reply

        def step(self, running: Mapping[int, OpenRequest]) -> list[tuple[OpenRequest, Any]]:
            return []

    loop = StepLoop(partial(Waiting, 8, threading.Semaphore()))
    loop.submit([sample(0, 1)], [])
    deadline = time.monotonic() + PATIENCE
    while not loop.call(lambda _: dict(loop._unanswered)) and time.monotonic() < deadline:
        time.sleep(0.001)
    with loop._changed:  # the thread sees both at once
        reply.set_exception(ArithmeticError("no answer can be read"))
        call = loop.post(lambda _: None)
    with pytest.raises(ArithmeticError, match="no answer can be read"):
        call.result(PATIENCE)
