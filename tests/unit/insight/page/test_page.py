"""The page holds the run's numbers and nothing else, acts on nothing that a run says, and fits whatever the
run's length."""

import base64
import hashlib
import json
import math
import re
import struct
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_series import SETTINGS, healthy, planted, wave, write_run

from verl_rc.insight import page as page_package
from verl_rc.insight.page import ReportRequest, build_page, write_report
from verl_rc.insight.page.charts import PANELS
from verl_rc.insight.page.encode import curve_of, packed
from verl_rc.insight.page.heat_map import heat_map_data
from verl_rc.insight.page.page import as_script
from verl_rc.insight.page.tables import alerts_panel, select_samples
from verl_rc.insight.page.text import escaped, number
from verl_rc.insight.run_folder import Alert, HeatMap, ReplayedRecord, SavedSample, Series, read_run
from verl_rc.insight.verdict import verdict_of

CHARTED = {name.replace("*", "1") for _, specs in PANELS.values() for spec in specs for name in spec.names}
ASSETS = Path(page_package.__file__).parent / "assets"
HOSTILE = [
    "</script><script>document.title='hacked'</script>",
    "<img src=x onerror=\"document.title='hacked'\">",
    "\u2028 \ud800 half a pair \u202e right to left",
    "<!--<script>",
    "]]>",
    "&lt;b&gt;",
    "' onmouseover='document.title=1",
    "\0\x1b[31m",
    "x" * 100_000,
]


class Elements(HTMLParser):
    """Which elements and attributes a page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        self.addresses += [
            str(value)
            for name, value in attributes
            if name in ("src", "href") and not str(value).startswith("#")
        ]


def page_of(run, **options) -> str:
    return build_page(run, verdict_of(run), **options)


def data_of(page: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)[1]
    )


def floats(text: str) -> list[float]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def hostile_run():
    run = planted({})
    run.name = HOSTILE[1]
    run.samples = [
        SavedSample(5, {"input": text, "output": text, "score": 0.5, "</td>" + HOSTILE[0]: text})
        for text in HOSTILE
    ]
    run.series = {**run.series, f"val-core/{HOSTILE[0]}/acc/mean@1": Series([1, 2, 3], [0.1, 0.2, 0.3])}
    run.settings = {**run.settings, HOSTILE[0]: HOSTILE[1]}
    run.plan = HOSTILE[0]
    run.notes = [HOSTILE[1]]
    return run


# ---- Safe.


def test_nothing_of_a_run_is_markup():
    usual, hostile = Elements(page_of(planted({}))), Elements(page_of(hostile_run()))
    for elements in (usual, hostile):
        assert elements.tags.count("script") == 4
        assert elements.handlers == []
        assert elements.addresses == []
        assert not {"img", "iframe", "object", "embed", "link", "base", "form"} & set(elements.tags)


def test_the_policy_is_first_and_allows_its_own_scripts_only():
    page = page_of(hostile_run())
    policy = re.search(r'<head><meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "http" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']*)'", policy) == digests
    assert len(digests) == 3


@pytest.mark.parametrize("text", HOSTILE[:7])
def test_data_cannot_end_their_element(text):
    written = as_script({"text": text})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {"text": text}


def test_control_codes_and_marks_of_direction_are_shown():
    page = page_of(hostile_run())
    assert r"\x00\x1b[31m" in page
    assert r"\u202e right to left" in page
    assert not set("\0\x1b") & set(page)


def test_half_a_surrogate_pair_can_be_written():
    escaped(HOSTILE[2]).encode("utf-8")


def test_secrets_and_text_can_be_kept_out():
    run = planted({})
    run.samples = [SavedSample(1, {"output": "PRIVATE-WORDS", "score": 1.0})]
    assert "PRIVATE-WORDS" in page_of(run)
    assert "This page holds texts of prompts and responses." in page_of(run)
    without = page_of(run, with_text=False)
    assert "PRIVATE-WORDS" not in without
    assert "This page holds no text of prompts or responses." in without


def test_what_is_not_ours_is_what_was_published():
    vendored = json.loads((ASSETS / "vendored.json").read_text())
    assert vendored["license"] == "MIT"
    assert vendored["version"] in (ASSETS / "uPlot.iife.min.js").read_text()[:100]
    for name, digest in vendored["sha256"].items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest, name
    ours = {"report.js", "tokens.js", "report.css", "vendored.json"}
    assert {path.name for path in ASSETS.iterdir()} == ours | vendored["sha256"].keys()


@pytest.mark.parametrize("name", ["report.js", "tokens.js"])
def test_our_scripts_are_small_and_plain(name):
    script = (ASSETS / name).read_text()
    assert len(script.splitlines()) <= 900
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|fetch\(|XMLHttp", script
    )


# ---- True.


def test_every_number_of_a_chart_is_the_runs():
    run = planted({})
    data = data_of(page_of(run))
    steps = [floats(text) for text in data["steps"]]
    checked = 0
    for chart in data["charts"]:
        for line in chart["lines"]:
            if line["label"] in run.series:
                series = run.series[line["label"]]
                assert steps[line["x"]] == [float(step) for step in series.steps]
                assert floats(line["y"]) == pytest.approx(list(series.values), rel=1e-6)
                checked += 1
    assert checked > 15


def test_the_verdict_on_the_page_is_the_one_in_words():
    run = planted({"rollout_corr/misalignment_z": [-30.0] * 40})
    page, verdict = page_of(run), verdict_of(run)
    for text in (
        verdict.headline,
        verdict.progress,
        *(found.text for found in verdict.statements),
        *verdict.do_first,
    ):
        assert escaped(text) in page


def test_every_metric_has_its_row_and_unknown_ones_say_so():
    run = planted({"my/own_metric": wave(3.0)})
    page = page_of(run)
    assert all(f">{name}</span>" in page for name in run.series)
    assert page.count("not in the catalogue") == 1


def test_missing_mass_is_drawn_from_two_of_verls_metrics():
    (chart,) = [
        chart for chart in data_of(page_of(planted({})))["charts"] if chart["title"] == "Missing mass"
    ]
    k1, k3 = healthy()["rollout_corr/kl"], healthy()["rollout_corr/k3_kl"]
    assert floats(chart["lines"][0]["y"]) == pytest.approx(
        [a - b for a, b in zip(k1, k3, strict=True)], abs=1e-9
    )


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9))
ANYTHING = PLAIN | st.lists(PLAIN, max_size=3) | st.just({"a": 1})
ANY_VALUE = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-10, 10)
ANY_NAME = st.sampled_from(sorted(CHARTED)) | st.text(max_size=12)


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(ANY_NAME, st.lists(ANY_VALUE, min_size=1, max_size=30), max_size=12),
    st.dictionaries(st.text(max_size=9) | st.sampled_from(sorted(SETTINGS)), ANYTHING, max_size=6),
    st.lists(
        st.dictionaries(st.sampled_from(["input", "output", "score", "x"]), ANYTHING, max_size=4), max_size=5
    ),
)
def test_any_run_has_a_page(metrics, config, samples):
    run = planted(
        metrics, config, without=[name for name in healthy() if name not in metrics] if metrics else []
    )
    run.settings = config
    run.samples = [SavedSample(step, cells) for step, cells in enumerate(samples, start=1)]
    page = page_of(run)
    page.encode("utf-8")
    data_of(page)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_short_runs_have_their_points(steps, tmp_path):
    run = read_run(write_run(tmp_path, healthy(steps=max(2, steps))))
    if steps == 1:
        run = read_run(tmp_path, 1, 1)
    (line,) = next(
        chart for chart in data_of(page_of(run))["charts"] if chart["title"] == "Reward of training samples"
    )["lines"]
    assert len(floats(line["y"])) == steps


def test_a_run_without_anything_says_what_is_missing(tmp_path):
    (tmp_path / "resolved_config.yaml").write_text("trainer: {seed: 3}\n")
    page = page_of(read_run(tmp_path))
    assert "Nothing can be told." in page
    assert "diagnostics=full records them" in page
    assert "log_val_generations" in page


# ---- Any length.


def test_a_spike_of_one_step_stays_in_the_drawing():
    values = [0.01 * math.sin(step) for step in range(10_000)]
    values[7776] = 5.0
    curve = curve_of(Series(range(1, 10_001), values))
    assert len(curve.x) <= 1_000
    at = max(range(len(curve.x)), key=lambda index: curve.high[index])
    assert curve.high[at] == 5.0
    assert abs(curve.x[at] - 7777) <= 10
    assert math.fsum(value * 10 for value in curve.y) == pytest.approx(math.fsum(values))


def test_buckets_have_the_extremes_of_a_band_and_keep_gaps():
    steps = [step for step in range(1, 5001) if not 2000 <= step < 3000]
    line, low = Series(steps, [1.0] * len(steps)), Series(steps, [-float(step) for step in steps])
    curve = curve_of(line, low, Series(steps, [2.0] * len(steps)), most_points=100)
    assert curve.low[0] == -50.0
    assert set(curve.high) == {2.0}
    assert not [x for x in curve.x if 2000 <= x < 3000]


def test_numbers_travel_as_float32():
    assert floats(packed([1.5, -2.0, math.inf, 1e300])) == [1.5, -2.0, math.inf, math.inf]
    assert math.isnan(floats(packed([math.nan]))[0])


def test_a_long_run_fits_in_size_and_time(tmp_path):
    """Of more steps than a curve has points; the browser's test has ten thousand."""
    steps = 2_500
    metrics = healthy(steps=steps) | {f"my/metric_{i}": wave(1.0, steps=steps) for i in range(20)}
    run = write_run(tmp_path / "run", metrics)
    started = time.process_time()
    report = write_report(ReportRequest(run))
    assert time.process_time() - started < 5
    assert report.path.stat().st_size < 8 << 20


@pytest.mark.parametrize(
    ("megabytes", "left_out"), [(0.3, "all but 10 samples"), (0.2, "points of curves beyond 100")]
)
def test_a_smaller_page_says_what_it_leaves_out(megabytes, left_out):
    run = planted({name: values * 10 for name, values in healthy().items()})
    run.samples = [SavedSample(5, {"output": "y" * 1_900, "score": 0.5}) for _ in range(60)]
    page = page_of(run, max_megabytes=megabytes)
    assert len(page.encode()) <= megabytes * (1 << 20)
    assert f"the page leaves out {left_out}" in page or f", {left_out}" in page


# ---- Pieces.


def test_the_heat_map_keeps_single_tokens_and_marks_percentiles():
    edges = [-2.0, -1.0, 0.0, 1.0, 2.0]
    data = heat_map_data(HeatMap([1, 2], edges, [[1, 0, 98, 1], [0, 0, 1e6, 1]]), {})
    cells = base64.b64decode(data["cells"])
    assert [cell > 0 for cell in cells] == [True, False, True, True, False, False, True, True]
    assert cells[6] == 255
    assert [floats(data["percentiles"][percent]) for percent in ("1", "50", "99")] == [[0, 2], [2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("level", "threshold", "bounds"),
    [
        ("token", 2.0, [math.log(2)]),
        ("token", "0.5_4.0", [-math.log(2), math.log(4)]),
        ("sequence", 2.0, []),
        ("token", "x", []),
    ],
)
def test_bounds_of_token_weights_are_drawn(level, threshold, bounds):
    prefix = "algorithm.rollout_correction.rollout_is"
    data = heat_map_data(HeatMap([1], [0.0, 1.0], [[1.0]]), {prefix: level, f"{prefix}_threshold": threshold})
    assert data["bounds"] == pytest.approx(bounds)


def test_samples_of_the_newest_step_from_both_ends():
    samples = [SavedSample(1, {"score": 0.0})] * 3 + [
        SavedSample(9, {"score": float(score)}) for score in range(6)
    ]
    chosen = select_samples(samples, 6)
    assert [(sample.step, sample.cells["score"]) for sample in chosen] == [
        (9, 0),
        (9, 5),
        (9, 1),
        (9, 4),
        (1, 0),
        (1, 0),
    ]


def test_alerts_show_their_cause_and_its_numbers():
    run = planted({})
    run.alerts = [Alert(3, "not healthy", "low")]
    assert '<th scope="col">cause</th>' not in alerts_panel(run)
    run.alerts = [
        *run.alerts,
        Alert(4, "gap: temperature", "cooler", "temperature", {"temperature_slope": -0.111}),
    ]
    panel = alerts_panel(run)
    assert "<td>temperature</td><td>temperature_slope -0.111</td>" in panel
    assert "<td>low</td><td></td><td></td>" in panel


def test_the_same_prompts_first_and_last():
    run = planted({})
    answers = [("p", "old", 1), ("q", "once", 1), ("p", "middle", 5), ("p", "new", 9)]
    run.samples = [
        SavedSample(step, {"input": prompt, "output": output, "score": 0.5})
        for prompt, output, step in answers
    ]
    table = page_of(run).partition("The same prompts, first and last")[2].partition("</section>")[0]
    assert re.findall(r"<bdi>(.*?)</bdi>", table) == ["p", "old", "0.5", "new", "0.5"]
    run.samples = run.samples[:2]
    assert "The same prompts" not in page_of(run)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.0, "3"),
        (12345.0, "12,345"),
        (1234.5, "1,234.5"),
        (0.123456, "0.1235"),
        (1e-9, "1e-09"),
        (math.nan, "not a number"),
    ],
)
def test_numbers_of_tables(value, text):
    assert number(value) == text


def test_replays_stand_beside_the_evidence_and_in_the_verdict(tmp_path):
    folder = write_run(tmp_path / "run", healthy())
    record = ReplayedRecord(9, 8, 700, 0.25, trainer=0.25, share=0.97, versions={0: 0.5, 8: 0.01})
    (folder / "diagnosis.json").write_text(json.dumps({"replayed": [record.as_json()]}))
    run = read_run(folder)
    assert run.replays == [record]
    verdict = verdict_of(run)
    assert "gap/the trainer scores other inputs or with noise" in verdict.code
    page = build_page(run, verdict)
    assert "0.25 (97%)" in page


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"replayed": 3}', '{"replayed": [3]}', '{"replayed": [{"step": "x"}]}']
)
def test_a_damaged_diagnosis_names_no_cause(tmp_path, text):
    folder = write_run(tmp_path / "run", healthy())
    (folder / "diagnosis.json").write_text(text)
    run = read_run(folder)
    assert verdict_of(run) == verdict_of(replace(run, replays=()))
    assert "<h3>Replays</h3>" not in build_page(run, verdict_of(run))
