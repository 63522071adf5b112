"""A run's trace as ten lines of text, as a picture, and as a file for Perfetto (https://ui.perfetto.dev)."""

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_rc.config.files import whole_or_absent
from verl_rc.insight.picture import COLOURS, write_picture
from verl_rc.insight.run_folder import whole_lines
from verl_rc.metrics.trace import STEP, TRACE_FILE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERFETTO_FILE = "trace.json"
PICTURE_FILE = "timeline.png"
_DRIVER = "driver"
_WAIT = "gen"
"""The stage in which the driver waits for samples."""
_WAITING_CALLS = ("generate", "submit")
"""Calls in which an engine's process may only wait for its own decoding, which it reports itself."""
_MOST_STEPS_DRAWN = 6
_MOST_ACTIVITIES_NAMED = 4


@dataclass(frozen=True)
class Span:
    """An activity of a process from ``begin`` to ``end``, in seconds since the trace began, by the driver's
    clock."""

    process: str
    activity: str
    begin: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds from begin to end."""
        return self.end - self.begin

    def part_within(self, begin: float, end: float) -> "Span | None":
        """The part of the span from ``begin`` to ``end``; None where it lies outside."""
        if self.end <= begin or self.begin >= end:
            return None
        return replace(self, begin=max(self.begin, begin), end=min(self.end, end))


@dataclass(frozen=True)
class Timeline:
    """A run's spans in the order of their beginnings, and its steps."""

    spans: Sequence[Span]
    steps: Mapping[int, Span]
    """Every finished step by number; a step that was repeated after a resume counts as it was done last."""

    @cached_property
    def _order(self) -> tuple[list[tuple[int, Span]], list[float]]:
        """Steps by their beginnings, and for each the latest end up to it."""
        steps = sorted(self.steps.items(), key=lambda item: item[1].begin)
        return steps, list(accumulate((step.end for _, step in steps), max))

    def parts_of(self, span: Span) -> Iterator[tuple[int, Span]]:
        """Number of each step that a span lies in, and the part of the span within it."""
        steps, ends = self._order
        for place in range(bisect_right(ends, span.begin), len(steps)):
            number, step = steps[place]
            if step.begin >= span.end:
                return
            if part := span.part_within(step.begin, step.end):
                yield number, part

    def between(self, first: int, last: int) -> "Timeline":
        """The part from the first to the last of these steps; spans are cut at its edges."""
        steps = {step: span for step, span in self.steps.items() if first <= step <= last}
        if not steps:
            raise ValueError(f"the trace has no step from {first} to {last}; it has {_range(self.steps)}.")
        begin, end = min(span.begin for span in steps.values()), max(span.end for span in steps.values())
        return Timeline([part for span in self.spans if (part := span.part_within(begin, end))], steps)


def read_timeline(folder: Path) -> Timeline:
    """Read ``trace.jsonl`` of a run, finished or not. Raises ``ValueError`` when it has none, or no finished
    step."""
    path = folder / TRACE_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} must be the folder of a run with async_training.trace=True, which writes {TRACE_FILE}."
        )
    spans = []
    for number, line in whole_lines(path, folder):
        try:
            fields = json.loads(line)
            process, activity, begin, end = (fields.pop(name) for name in ("who", "what", "begin", "end"))
            if "step" in fields:
                fields["step"] = int(fields["step"])
            spans.append(Span(process, activity, float(begin), float(end), fields))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            form = '{"who": …, "what": …, "begin": …, "end": …}'
            raise ValueError(f"{path}, line {number} must be {form}: {error}.") from error
    spans = sorted(_by_driver_clock(spans), key=lambda span: span.begin)
    steps = {span.facts["step"]: span for span in spans if span.activity == STEP and "step" in span.facts}
    if not steps:
        raise ValueError(f"{path} must hold at least one finished step; the run has finished none yet.")
    decoding = {span.process for span in spans if span.activity == "decode"}
    spans = [
        span
        for span in spans
        if span.activity != STEP and not (span.process in decoding and span.activity in _WAITING_CALLS)
    ]
    return Timeline(spans, steps)


def _by_driver_clock(spans: Sequence[Span]) -> list[Span]:
    """The spans by the driver's clock, from 0 on."""
    start = min((span.facts.get("sent", span.begin) for span in spans), default=0.0)
    by_process: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_process[span.process].append(span)
    offsets = {process: clock_offset(process_spans) for process, process_spans in by_process.items()}
    return [
        replace(
            span,
            begin=span.begin - offsets[span.process] - start,
            end=span.end - offsets[span.process] - start,
        )
        for span in spans
    ]


def clock_offset(spans: Iterable[Span]) -> float:
    """Seconds that a process's clock is ahead of the driver's; 0 where the process's calls allow 0.

    A call begins after the driver sent it and ends before the driver received its answer. So the offset lies
    between the largest end - received and the smallest begin - sent; the middle of that interval is taken
    when 0 is not in it.
    """
    calls = [(span, span.facts) for span in spans if "sent" in span.facts]
    lower = max((span.end - facts["received"] for span, facts in calls), default=0.0)
    upper = min((span.begin - facts["sent"] for span, facts in calls), default=0.0)
    return 0.0 if lower <= 0 <= upper else (lower + upper) / 2


def describe(timeline: Timeline) -> str:
    """Say in at most ten lines how long steps take, what every role does in them, and the longest waits for
    samples."""
    total = sum(span.seconds for span in timeline.steps.values())
    count = len(timeline.steps)
    lines = [f"step{'s' * (count > 1)} {_range(timeline.steps)}: {total:.1f} s, {total / count:.2f} s each"]
    by_role: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in timeline.spans:
        for _, part in timeline.parts_of(span):
            by_role[_role(span.process)][span.process].append(part)
    lines += [_describe_role(role, by_role[role], total) for role in sorted(by_role, key=_display_order)][:6]
    waits = sorted(_waits(timeline), key=lambda wait: -wait[0])
    if waits:
        sentences = (
            f"{seconds:.2f} s in step {step}{_group_numbers(numbers)}" for seconds, step, numbers in waits[:3]
        )
        lines.append("longest waits for samples: " + "; ".join(sentences))
    return "".join(f"{line}\n" for line in lines)


def _waits(timeline: Timeline) -> list[tuple[float, int, list[int]]]:
    """Seconds for which the driver waited for samples in a step, the step, and the numbers of the groups it
    waited for last."""
    driver_waits = [span for span in timeline.spans if (span.process, span.activity) == (_DRIVER, _WAIT)]
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in driver_waits:
        for number, _ in timeline.parts_of(span):
            by_step[number].append(span)
    return [
        (sum(span.seconds for span in spans), number, list(spans[-1].facts.get("numbers", [])))
        for number, spans in sorted(by_step.items())
    ]


def _group_numbers(numbers: Sequence[int]) -> str:
    return f", group{'s' * (len(numbers) > 1)} {_range(numbers)}" if numbers else ""


def _describe_role(role: str, processes: Mapping[str, Sequence[Span]], total: float) -> str:
    """Shares of the steps' time, the mean over the role's processes."""
    shares: dict[str, float] = defaultdict(float)
    for spans in processes.values():
        for activity in {span.activity for span in spans}:
            shares[activity] += (
                _covered(span for span in spans if span.activity == activity) / total / len(processes)
            )
    busy = sum(_covered(spans) for spans in processes.values()) / total / len(processes)
    parts = sorted(shares.items(), key=lambda item: -item[1])[:_MOST_ACTIVITIES_NAMED]
    name = role if len(processes) == 1 else f"{role} (mean of {len(processes)})"
    return f"{name}: {busy:.0%} of the time; " + ", ".join(
        f"{activity} {share:.0%}" for activity, share in parts
    )


def _covered(spans: Iterable[Span]) -> float:
    """Seconds that are covered by at least one of the spans."""
    covered, latest_end = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.begin):
        covered += max(0.0, span.end - max(span.begin, latest_end))
        latest_end = max(latest_end, span.end)
    return covered


def _role(process: str) -> str:
    return re.sub(r" \d+$", "", process)


def _display_order(process: str) -> tuple[int, str, int]:
    """Sort key: engines, then the driver, then trainer ranks and other processes, each by number."""
    match = re.search(r" (\d+)$", process)
    place = 0 if "engine" in process else 1 if process == _DRIVER else 2
    return place, _role(process), int(match[1]) if match else 0


def _range(numbers: Collection[int]) -> str:
    return f"{min(numbers)}" if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"


def write_perfetto(timeline: Timeline, folder: Path) -> Path:
    """Write all spans in the Trace Event format of Chrome, which Perfetto opens; returns the file."""
    names = sorted({span.process for span in timeline.spans}, key=_display_order)
    rows = {name: row for row, name in enumerate(["steps", *names])}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}}
        for name, row in rows.items()
    ]
    steps = [(0, replace(span, activity=f"step {number}")) for number, span in timeline.steps.items()]
    for row, span in [*steps, *((rows[span.process], span) for span in timeline.spans)]:
        times = {"ts": span.begin * 1e6, "dur": span.seconds * 1e6}
        event = {"ph": "X", "name": span.activity, "pid": 1, "tid": row, **times, "args": dict(span.facts)}
        events.append(event)
    path = folder / PERFETTO_FILE
    with whole_or_absent(path) as file:
        file.write(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
    return path


def draw_timeline(timeline: Timeline, folder: Path) -> Path:
    """Draw one row per process, engines above the driver above the ranks; waits for samples are hatched.
    Returns the file."""
    names = sorted({span.process for span in timeline.spans}, key=_display_order)
    draw = partial(_draw_rows, timeline=timeline, names=names)
    return write_picture(folder / PICTURE_FILE, (11, 1.6 + 0.5 * len(names)), draw)


def _draw_rows(figure: "Figure", timeline: Timeline, names: Sequence[str]) -> None:
    axes = figure.subplots()
    seconds: dict[str, float] = defaultdict(float)
    bars: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        seconds[span.activity] += span.seconds
        bars[span.process, span.activity].append((span.begin, span.seconds))
    longest = sorted(seconds, key=lambda activity: -seconds[activity])
    colours = {activity: COLOURS[index % len(COLOURS)] for index, activity in enumerate(longest)}
    rows = {name: row for row, name in enumerate(names)}
    ranks = {activity: rank for rank, activity in enumerate(longest)}
    for name, activity in sorted(bars, key=lambda key: (rows[key[0]], ranks[key[1]])):
        is_wait = (name, activity) == (_DRIVER, _WAIT)
        axes.broken_barh(
            bars[name, activity],
            (rows[name] - 0.4, 0.8),
            edgecolor=colours[activity],
            facecolor="none" if is_wait else colours[activity],
            hatch="////" if is_wait else None,
            linewidth=0.5,
        )
    for activity in longest[: len(COLOURS)]:
        axes.plot([], [], color=colours[activity], linewidth=6, label=activity)
    for number, span in timeline.steps.items():
        axes.axvline(span.begin, linewidth=0.8)
        axes.annotate(
            f"step {number}",
            (span.begin, -0.6),
            xytext=(3, 0),
            textcoords="offset points",
            annotation_clip=False,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.9)
    axes.set_xlabel("seconds")
    if longest:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def write_timeline(folder: Path, steps: tuple[int, int] | None = None) -> str:
    """Write both files of the run in ``folder``; returns the text. ``steps``: the first and the last to draw
    and describe.

    None: the last six steps are drawn, and all are described. Raises ``ValueError`` when there is no trace or
    no such step.
    """
    timeline = read_timeline(folder)
    newest = max(timeline.steps)
    described = timeline.between(*(steps or (min(timeline.steps), newest)))
    drawn = described if steps else timeline.between(newest + 1 - _MOST_STEPS_DRAWN, newest)
    files = [write_perfetto(timeline, folder), draw_timeline(drawn, folder)]
    return describe(described) + "".join(f"{path}\n" for path in files)
