"""The trace of a run: spans on one clock, shares of time, longest waits, picture and Perfetto file."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.cli import main
from verl_rc.insight.timeline import Span, clock_offset, describe, read_timeline, write_timeline
from verl_rc.metrics.trace import TRACE_FILE, Trace

ENGINE_CLOCK = 100.0
"""Seconds that the engine's host is ahead."""


def write_trace(folder: Path) -> Path:
    """Two steps of 10 s. The driver waits 4 s in the first and 2 s in the second; the engine works 3 s of
    each, the rank 5 s."""
    trace = Trace()
    with trace.writing(folder / TRACE_FILE):
        trace.span(
            "rollout engine 0",
            "start",
            990.0 + ENGINE_CLOCK,
            999.0 + ENGINE_CLOCK,
            sent=990.0,
            received=999.0,
        )
        for step, (begin, wait) in enumerate(((1000.0, 4.0), (1010.0, 2.0)), start=1):
            first = begin + 1 + ENGINE_CLOCK
            trace.span(
                "rollout engine 0",
                "generate",
                first - 0.5,
                first + 3.5,
                sent=begin + 0.5,
                received=begin + 4.5,
            )
            trace.span("rollout engine 0", "decode", first, first + 3)
            trace.span("driver", "gen", begin, begin + wait, numbers=[8 * step, 8 * step + 1])
            trace.span(
                "trainer rank 0",
                "update",
                begin + wait,
                begin + wait + 5,
                sent=begin + wait,
                received=begin + wait + 5,
            )
            trace.span("driver", "step", begin, begin + 10, step=step)
    return folder


def test_shares_of_the_steps_time_and_the_longest_waits(tmp_path):
    assert describe(read_timeline(write_trace(tmp_path))).splitlines() == [
        "steps 1 to 2: 20.0 s, 10.00 s each",
        "rollout engine: 30% of the time; decode 30%",
        "driver: 30% of the time; gen 30%",
        "trainer rank: 50% of the time; update 50%",
        "longest waits for samples: 4.00 s in step 1, groups 8 to 9; 2.00 s in step 2, groups 16 to 17",
    ]


def test_spans_of_another_host_are_on_the_drivers_clock(tmp_path):
    spans = [span for span in read_timeline(write_trace(tmp_path)).spans if span.activity == "decode"]
    # The trace begins at 990, when the engine's start was sent; step 1 begins 10 s later, and sampling 1 s
    # after that.
    assert [(span.begin, span.end) for span in spans] == [(11.0, 14.0), (21.0, 24.0)]


@given(
    offset=st.floats(-1e4, 1e4),
    calls=st.lists(st.tuples(st.floats(0, 100), *[st.floats(0, 5)] * 3), min_size=1, max_size=20),
)
def test_a_clocks_offset_is_found_as_exactly_as_the_fastest_calls_allow(offset, calls):
    spans, before, after = [], [], []
    for sent, out, seconds, back in calls:
        begin = sent + out + offset
        spans.append(
            Span(
                "engine",
                "call",
                begin,
                begin + seconds,
                {"sent": sent, "received": sent + out + seconds + back},
            )
        )
        before.append(out)
        after.append(back)
    found = clock_offset(spans)
    # The offset lies in [offset - min(back), offset + min(out)]; its middle, or 0, is off by that at most.
    assert -min(after) - 1e-6 <= found - offset <= min(before) + 1e-6


def test_a_process_on_the_drivers_host_is_not_moved(tmp_path):
    spans = [span for span in read_timeline(write_trace(tmp_path)).spans if span.process == "trainer rank 0"]
    assert [span.begin for span in spans] == [14.0, 22.0]


def test_calls_that_overlap_count_once(tmp_path):
    trace = Trace()
    with trace.writing(tmp_path / TRACE_FILE):
        trace.span("engine 0", "collect", 0.0, 4.0)
        trace.span("engine 0", "submit", 2.0, 6.0)
        trace.span("engine 1", "collect", 0.0, 2.0)
        trace.span("driver", "step", 0.0, 10.0, step=1)
    # (6 + 2) / 2 of 10 s; collect: (4 + 2) / 2; submit: 4 / 2.
    assert "engine (mean of 2): 40% of the time; collect 30%, submit 20%" in describe(read_timeline(tmp_path))


def test_a_resumed_run_goes_on_behind_half_a_span(tmp_path):
    path = tmp_path / TRACE_FILE
    for step in (1, 2):
        trace = Trace()
        with trace.writing(path):
            trace.span("driver", "step", 10.0 * step, 10.0 * step + 5, step=step)
        with path.open("ab") as file:
            file.write('{"who": "é'.encode()[:-1])  # killed here
    assert list(read_timeline(tmp_path).steps) == [1, 2]


def test_steps_are_chosen_and_spans_cut_at_their_edges(tmp_path):
    text = write_timeline(write_trace(tmp_path), (2, 2))
    assert text.splitlines()[0] == "step 2: 10.0 s, 10.00 s each"
    part = read_timeline(tmp_path).between(2, 2)
    assert min(span.begin for span in part.spans) >= 20.0


def test_the_perfetto_file_has_every_span_in_microseconds(tmp_path):
    write_timeline(write_trace(tmp_path))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "steps", 1: "rollout engine 0", 2: "driver", 3: "trainer rank 0"}
    drawn = [
        (names[event["tid"]], event["name"], event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X"
    ]
    assert ("rollout engine 0", "decode", 11e6, 3e6) in drawn
    assert ("steps", "step 2", 20e6, 10e6) in drawn
    assert len(drawn) == 7 + 2


def test_a_killed_and_resumed_run_counts_a_repeated_step_once(tmp_path):
    write_trace(tmp_path)
    with (tmp_path / TRACE_FILE).open("a") as file:
        file.write(
            json.dumps({"who": "driver", "what": "step", "begin": 1050.0, "end": 1055.0, "step": 2}) + "\n"
        )
        file.write('{"who": "driver", "wh')
    assert describe(read_timeline(tmp_path)).startswith("steps 1 to 2: 15.0 s, 7.50 s each\n")


def test_nothing_is_written_outside_a_traced_run(tmp_path):
    trace = Trace()
    with trace.writing(None), trace.driver("gen"):
        trace.span("driver", "step", 0.0, 1.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "with async_training.trace=True"),
        ("", "at least one finished step"),
        ('{"who": "driver"}\n', "line 1 must be"),
        ("[]\n", "line 1 must be"),
        ('{"who": "driver", "what": "step", "begin": "a", "end": 1, "step": 1}\n', "line 1 must be"),
        ('{"who": "driver", "what": "step", "begin": 0, "end": 1, "step": "a"}\n', "line 1 must be"),
    ],
)
def test_a_folder_without_a_trace_is_one_sentence(lines, said, tmp_path, capsys):
    if lines is not None:
        (tmp_path / TRACE_FILE).write_text(lines)
    assert main(["trace", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_the_command_prints_the_text_and_names_its_files(tmp_path, capsys):
    assert main(["trace", str(write_trace(tmp_path)), "--steps", "1-1"]) == 0
    written = capsys.readouterr().out.splitlines()
    assert written[0] == "step 1: 10.0 s, 10.00 s each"
    assert written[-2:] == [str(tmp_path / "trace.json"), str(tmp_path / "timeline.png")]
    assert main(["trace", str(tmp_path), "--steps", "7-9"]) == 2
    assert "no step from 7 to 9; it has 1 to 2" in capsys.readouterr().err
