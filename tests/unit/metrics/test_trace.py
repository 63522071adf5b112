"""The trace of a run: events that Perfetto opens at any moment, on the driver's clock, none over another."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.metrics.trace import TRACE_FILE, Trace

AHEAD = 100.0
"""Seconds that the engine's host is ahead."""
ENGINE = "rollout engine 0"


def write_trace(path: Path) -> None:
    """Two steps of 10 s. The driver waits 4 s in the first and 2 s in the second; the engine decodes 3 s of
    each."""
    trace = Trace()
    with trace.writing(path):
        trace.span(ENGINE, "start", 990.0 + AHEAD, 999.0 + AHEAD, call=(990.0, 999.0))
        for step, (begin, wait) in enumerate(((1000.0, 4.0), (1010.0, 2.0)), start=1):
            first = begin + 1 + AHEAD
            trace.span(ENGINE, "generate", first - 0.5, first + 3.5, call=(begin + 0.5, begin + 4.5))
            trace.span(ENGINE, "decode", first, first + 3)
            trace.span("driver", "gen", begin, begin + wait, numbers=[8 * step])
            trace.span("driver", f"step {step}", begin, begin + 10)


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events, as Perfetto reads an array without an end: commas between objects mean nothing."""
    text = path.read_text()
    assert text.startswith("[\n")
    events: list[dict[str, Any]] = json.loads(text.rstrip(",\n") + "]")
    return events


def spans_of(path: Path) -> list[tuple[str, str, float, float]]:
    """Process, activity, begin and end in seconds."""
    events = events_of(path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return [
        (names[event["pid"]], event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X"
    ]


def test_every_span_is_an_event_on_the_drivers_clock(tmp_path: Path) -> None:
    write_trace(tmp_path / TRACE_FILE)
    spans = spans_of(tmp_path / TRACE_FILE)
    assert len(spans) == 9
    assert (ENGINE, "decode", 1001.0, 1004.0) in spans
    assert ("driver", "gen", 1010.0, 1012.0) in spans
    assert ("driver", "step 2", 1010.0, 1020.0) in spans
    assert [event["args"] for event in events_of(tmp_path / TRACE_FILE) if event["name"] == "gen"] == [
        {"numbers": [8]},
        {"numbers": [16]},
    ]


def test_spans_of_one_row_do_not_overlap(tmp_path: Path) -> None:
    write_trace(tmp_path / TRACE_FILE)
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events_of(tmp_path / TRACE_FILE):
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in rows.values():
        events.sort(key=lambda event: event["ts"])
        ends = [event["ts"] + event["dur"] for event in events]
        assert all(end <= event["ts"] for end, event in zip(ends, events[1:], strict=False))
    assert len(rows) == 4  # calls and sampling of the engine, steps and stages of the driver


@given(
    offset=st.floats(-1e4, 1e4),
    calls=st.lists(st.tuples(st.floats(0, 100), *[st.floats(0, 5)] * 3), min_size=1, max_size=20),
)
def test_a_clocks_offset_is_found_as_exactly_as_the_fastest_calls_allow(
    tmp_path_factory: pytest.TempPathFactory, offset: float, calls: list[tuple[float, float, float, float]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / TRACE_FILE
    trace = Trace()
    with trace.writing(path):
        for sent, out, seconds, back in calls:
            begin, received = sent + out + offset, sent + out + seconds + back
            trace.span(ENGINE, "call", begin, begin + seconds, call=(sent, received))
        trace.span(ENGINE, "decode", 200 + offset, 201 + offset)
    found = spans_of(path)[-1][2]
    # The offset lies in [offset - min(back), offset + min(out)]; its middle, or 0, is off by that at most.
    shortest_out, shortest_back = min(call[1] for call in calls), min(call[3] for call in calls)
    assert -shortest_out - 1e-5 <= found - 200 <= shortest_back + 1e-5


@pytest.mark.parametrize("killed", [b"", '{"ph": "é'.encode()[:-1], b'{"ph": "X"}'])
def test_a_resumed_run_goes_on_behind_half_an_event(tmp_path: Path, killed: bytes) -> None:
    path = tmp_path / TRACE_FILE
    for step in (1, 2, 3):
        trace = Trace()
        with trace.writing(path):
            trace.span("driver", f"step {step}", 10.0 * step, 10.0 * step + 5)
        with path.open("ab") as file:
            file.write(killed)
    path.write_bytes(path.read_bytes().removesuffix(killed))
    assert spans_of(path) == [("driver", f"step {step}", 10.0 * step, 10.0 * step + 5) for step in (1, 2, 3)]


def test_a_run_that_was_killed_at_its_first_byte_goes_on(tmp_path: Path) -> None:
    (tmp_path / TRACE_FILE).write_text("[")
    write_trace(tmp_path / TRACE_FILE)
    assert len(spans_of(tmp_path / TRACE_FILE)) == 9


def test_nothing_is_written_outside_a_traced_run(tmp_path: Path) -> None:
    trace = Trace()
    with trace.writing(None), trace.driver("gen"):
        trace.span("driver", "step 1", 0.0, 1.0)
    assert not list(tmp_path.iterdir())
