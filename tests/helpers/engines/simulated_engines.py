"""A loop of engines and a trainer in simulated time, which decides with the rules of
``verl_rc.algorithm.supply``; shared by their tests.

Engines decode with continuous batching: a decode step of b running responses takes ``decode_ms + each_ms *
b`` and gives each one token. Lengths are lognormal, half of the log-variance belongs to the prompt. A
response may be a conversation, whose tools take their seconds beside everything else. The rest is the
asynchronous loop: admit what the rule allows, wait until there is a batch, train, publish every M-th step.
"""

import collections
import heapq
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from verl_rc.algorithm.supply.group_book import AdmissionRule, GroupBook
from verl_rc.algorithm.supply.replay_order import NextBatch, ReplayRule, next_batch


class Turn(NamedTuple):
    """What the policy writes between two answers of tools."""

    tokens: int
    tool_seconds: float = 0.0
    """How long the tool takes that the turn calls; the last turn calls none."""


Turns = tuple[Turn, ...]


@dataclass(frozen=True)
class Cluster:
    """Half of the devices sample, half of them train."""

    devices: int = 8
    batch: int = 16
    """Groups from one publication to the next; a step trains ``batch / every`` of them."""
    samples: int = 2
    mean: float = 300.0
    sigma: float = 1.0
    longest: int = 4000
    prompt: int = 30
    decode_ms: float = 6.5
    each_ms: float = 0.13
    slots: int = 16
    prefill_per_second: float = 20e3
    update_per_second: float = 4300.0
    score_per_second: float = 11e3
    fixed_seconds: float = 0.2
    other_seconds: float = 0.15
    sync_seconds: float = 0.03
    draw_group: Callable[[random.Random], list[Turns]] | None = None
    """The conversations of a prompt; None: lengths are drawn from ``mean``, ``sigma`` and ``longest``, and
    there are no tools."""

    def draw(self, rng: random.Random) -> list[Turns]:
        """The samples of a prompt."""
        if self.draw_group is not None:
            return self.draw_group(rng)
        location, spread = math.log(self.mean) - self.sigma**2 / 2, self.sigma / math.sqrt(2)
        of_prompt = rng.gauss(0, spread)
        drawn = [math.exp(location + of_prompt + rng.gauss(0, spread)) for _ in range(self.samples)]
        return [(Turn(max(16, min(self.longest, int(length)))),) for length in drawn]


def conversations(
    decode_ms: float, training: float, batch: int, draw: Callable[[random.Random], list[Turns]]
) -> Cluster:
    """One engine that never gets slower, and a trainer that takes ``training`` seconds from one publication
    to the next."""
    return Cluster(
        devices=2,
        batch=batch,
        slots=10_000,
        decode_ms=decode_ms,
        each_ms=0,
        prefill_per_second=math.inf,
        update_per_second=math.inf,
        score_per_second=math.inf,
        fixed_seconds=training,
        other_seconds=0,
        sync_seconds=0,
        draw_group=draw,
    )


@dataclass(frozen=True)
class Mode:
    """The settings of ``async_training`` that the loop knows."""

    ahead: Fraction = Fraction(0)
    hard: Fraction | None = None
    every: int = 1
    order: Literal["admitted", "ready"] = "admitted"
    late: Literal["wait", "drop"] = "wait"
    partial: bool = True

    @property
    def oldest(self) -> int:
        """Steps."""
        return max(0, math.ceil(self.every * ((self.ahead if self.hard is None else self.hard) + 1)) - 1)


@dataclass
class Outcome:
    """What happened; of the measures, those after the warm-up."""

    admitted: list[int] = field(default_factory=list)
    """Tokens of every group in the order of admission."""
    trained: list[int] = field(default_factory=list)
    """Tokens of every group that was trained on."""
    ages: list[int] = field(default_factory=list)
    step_seconds: float = 0.0
    """From one publication to the next."""
    wasted: float = 0.0
    """Share of tokens that were dropped."""
    length_ratio: float = 0.0
    """Mean trained over mean admitted."""


@dataclass
class _Group:
    number: int
    version: int
    lengths: list[int]
    running: int
    num_sampled: int = 0
    """The book of this loop counts no tokens."""

    @property
    def is_accepted(self) -> bool:
        return self.running == 0


class _Engine:
    """All that run get the same tokens: ``position`` counts them, so a response that starts at p with length
    L ends at p + L."""

    def __init__(self) -> None:
        self.position = self.time = self.paused_until = 0.0
        self.running: list[tuple[float, int, float, float, Turns, _Group]] = []
        self.waiting: collections.deque[tuple[_Group, Turns]] = collections.deque()
        self.stamp = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)


class _Loop:
    def __init__(self, cluster: Cluster, mode: Mode, seed: int) -> None:
        self.cluster, self.mode, self.rng = cluster, mode, random.Random(seed)
        batch = cluster.batch // mode.every
        self.rule = ReplayRule(mode.order, batch, mode.oldest, mode.late)
        places = math.ceil(mode.every * (1 + mode.ahead) * batch)
        self.book: GroupBook[_Group] = GroupBook(AdmissionRule(batch, places))
        self.trainers = cluster.devices - round(cluster.devices * 0.5)
        self.engines = [_Engine() for _ in range(round(cluster.devices * 0.5))]
        self.loads = [(0, index) for index in range(len(self.engines))]
        self.now, self.trained = 0.0, 0
        self.events: list[tuple[float, int, int]] = []
        self.tools: list[tuple[float, int, float, Turns, _Group]] = []
        """Ends of tools: time, engine, what orders equal ones, the turns that are left, the group."""
        self.outcome = Outcome()
        self.sampled, self.dropped = 0, 0.0
        self.ended_since_step = 0

    def token_ms(self, engine: _Engine) -> float:
        return self.cluster.decode_ms + self.cluster.each_ms * len(engine.running)

    def advance(self, index: int, time: float) -> None:
        engine = self.engines[index]
        start = min(max(engine.time, engine.paused_until), time)
        if engine.running and time > start:
            engine.position += (time - start) * 1000 / self.token_ms(engine)
        engine.time = max(engine.time, time)

    def plan(self, index: int) -> None:
        """The engine's next event: the end of its shortest response."""
        engine = self.engines[index]
        engine.stamp += 1
        if engine.running:
            left = (engine.running[0][0] - engine.position) * self.token_ms(engine) / 1000
            heapq.heappush(self.events, (max(engine.time, engine.paused_until) + left, index, engine.stamp))

    def fill(self, index: int) -> None:
        engine = self.engines[index]
        while engine.waiting and len(engine.running) < self.cluster.slots:
            group, turns = engine.waiting.popleft()
            end = engine.position + turns[0].tokens
            begun = (end, group.number, self.rng.random(), engine.position, turns, group)
            heapq.heappush(engine.running, begun)
        self.plan(index)

    def least_loaded(self) -> int:
        while True:
            load, index = heapq.heappop(self.loads)
            if load == self.engines[index].load:  # else a later entry is true
                heapq.heappush(self.loads, (load + 1, index))
                return index

    def admit(self) -> None:
        touched, groups = set(), []
        for number in range(self.book.admitted, self.book.admitted + self.book.allowance()):
            samples = self.cluster.draw(self.rng)
            lengths = [sum(turn.tokens for turn in turns) for turns in samples]
            group = _Group(number, self.book.published, lengths, len(lengths))
            groups.append(group)
            self.outcome.admitted.append(sum(lengths))
            for turns in samples:
                index = self.least_loaded()
                self.engines[index].waiting.append((group, turns))
                touched.add(index)
        self.book.admit(groups)
        for index in touched:
            self.advance(index, self.now)
            self.fill(index)

    def next_event(self, until: float) -> bool:
        """The next turn or tool ends; False when none does before ``until``."""
        while self.events and self.events[0][2] != self.engines[self.events[0][1]].stamp:
            heapq.heappop(self.events)
        turn_ends = self.events[0][0] if self.events else math.inf
        tool_ends = self.tools[0][0] if self.tools else math.inf
        if min(turn_ends, tool_ends) > until or min(turn_ends, tool_ends) == math.inf:
            return False
        if tool_ends < turn_ends:
            time, index, _, turns, group = heapq.heappop(self.tools)
            self.now = max(self.now, time)
            self.advance(index, time)
            self.engines[index].waiting.append((group, turns))
        else:
            index = self.end_turn()
        self.fill(index)
        heapq.heappush(self.loads, (self.engines[index].load, index))
        return True

    def end_turn(self) -> int:
        """The shortest turn of an engine ends; returns the engine."""
        time, index, _ = heapq.heappop(self.events)
        self.now = max(self.now, time)
        self.advance(index, time)
        engine = self.engines[index]
        end, _, _, _, (turn, *left), group = heapq.heappop(engine.running)
        engine.position, self.sampled = max(engine.position, end), self.sampled + turn.tokens
        if left:
            heapq.heappush(
                self.tools, (time + turn.tool_seconds, index, self.rng.random(), tuple(left), group)
            )
            return index
        group.running -= 1
        if group.running == 0:
            self.ended_since_step += 1
        return index

    def decide(self) -> NextBatch:
        return next_batch(self.book.open.values(), self.trained + 1, self.rule)

    def drop(self, numbers: tuple[int, ...]) -> None:
        gone = set(numbers)
        for index, engine in enumerate(self.engines):
            self.advance(index, self.now)
            self.dropped += sum(engine.position - begun[3] for begun in engine.running if begun[1] in gone)
            engine.running = [begun for begun in engine.running if begun[1] not in gone]
            heapq.heapify(engine.running)
            engine.waiting = collections.deque(one for one in engine.waiting if one[0].number not in gone)
            self.fill(index)
            heapq.heappush(self.loads, (engine.load, index))
        self.tools = [tool for tool in self.tools if tool[-1].number not in gone]
        heapq.heapify(self.tools)
        for group in self.book.end("stale", numbers):
            self.dropped += 0 if group.running else sum(group.lengths)
        self.admit()

    def take(self) -> list[_Group]:
        """The groups of the next step, waited for."""
        decision = self.decide()
        if decision.dropped:
            self.drop(decision.dropped)
            decision = self.decide()
        while not decision.numbers:
            ended = self.ended_since_step
            while self.ended_since_step == ended:
                assert self.next_event(math.inf), "nothing is in flight, and there is no batch"
            decision = self.decide()
        return self.book.end("trained", decision.numbers)

    def step(self) -> list[_Group]:
        cluster, every = self.cluster, self.mode.every
        batch = self.take()
        tokens = sum(sum(group.lengths) + cluster.samples * cluster.prompt for group in batch)
        rates = 1 / cluster.update_per_second + 1 / cluster.score_per_second
        training = tokens / self.trainers * rates + cluster.fixed_seconds / every
        until = self.now + training + cluster.other_seconds / every
        while self.next_event(until):
            pass
        self.now = until
        self.outcome.trained += [sum(group.lengths) for group in batch]
        ages = [self.trained - group.version for group in batch]
        self.trained += 1
        if self.trained % every == 0:
            self.publish()
        self.admit()
        self.book.close_step(0, {})
        self.outcome.ages += ages
        return batch

    def publish(self) -> None:
        cluster = self.cluster
        if not self.mode.partial:
            while self.next_event(math.inf):
                pass
        for index, engine in enumerate(self.engines):
            self.advance(index, self.now)
            again = sum(engine.position - begun[3] + cluster.prompt for begun in engine.running)
            engine.paused_until = self.now + cluster.sync_seconds + again / cluster.prefill_per_second
            self.plan(index)
        if not self.mode.partial:
            self.now += cluster.sync_seconds
        self.book.publish(self.trained)


def run_loop(
    mode: Mode,
    cluster: Cluster = Cluster(),
    *,
    publications: int = 12,
    warm_up: int = 3,
    seed: int = 0,
    ends: bool = False,
) -> Outcome:
    """Train for so many publications; the book is checked at every step.

    ``ends``: the number of steps is known, so that nothing is admitted that would not be trained on.
    """
    loop = _Loop(cluster, mode, seed)
    if ends:
        loop.book.rule = replace(loop.book.rule, total=publications * mode.every * loop.rule.batch)
    loop.admit()
    marks, tokens = [], []
    for _ in range(publications * mode.every):
        tokens.append(sum(sum(group.lengths) for group in loop.step()))
        marks.append((loop.now, loop.dropped, loop.sampled))
    if ends:
        loop.book.close_run()
    first, last, outcome = marks[warm_up * mode.every - 1], marks[-1], loop.outcome
    steps = (publications - warm_up) * mode.every
    outcome.ages = outcome.ages[-steps * loop.rule.batch :]
    outcome.step_seconds = (last[0] - first[0]) / steps * mode.every
    outcome.wasted = (last[1] - first[1]) / (last[2] - first[2] + last[1] - first[1])
    outcome.length_ratio = (
        sum(tokens[-steps:]) / (steps * loop.rule.batch) / statistics.mean(outcome.admitted)
    )
    return outcome
