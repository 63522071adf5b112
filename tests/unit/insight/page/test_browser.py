"""The page in headless Chromium: it draws, asks for nothing, complains about nothing, and nothing that a run
says acts in it."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import browser as headless
import numpy as np
import pytest
from browser import Browser, open_browser
from planted_series import healthy, wave, write_run
from recorded_tokens import PIECES_OF_DIGITS, token_record, write_tokens

from verl_rc.cli import main
from verl_rc.metrics.log_ratio_bins import HISTOGRAM_EDGES
from verl_rc.metrics.sinks.local import JsonlSink

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(not (headless.DRIVER and headless.CHROMIUM), reason=headless.REASON),
]
HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
READY = "document.documentElement.dataset.ready === 'yes'"


def run_folder(folder: Path) -> Path:
    """A run with everything that a page can show, and with hostile names and texts wherever a run can put
    them."""
    steps = 60
    metrics = {**healthy(steps=steps), f"val-core/{HOSTILE}/acc/mean@1": [0.1, 0.2, 0.4]}
    metrics |= {
        "critic/score/min": [0.0] * steps,
        "critic/score/max": [1.0] * steps,
        "actor/kl_loss": [math.nan] * steps,
    }
    metrics |= {
        "ledger/trained_tokens": wave(9_000.0, steps=steps),
        "ledger/rejected_tokens": wave(1_000.0, steps=steps),
    }
    samples = [
        {"input": HOSTILE, "output": text, "score": 0.5}
        for text in (HOSTILE, "\u202eabc", "\ud800", "x" * 100_000)
    ]
    write_run(
        folder,
        metrics,
        [{**sample, "output": sample["output"].encode("utf-8", "replace").decode()} for sample in samples],
    )
    sink = JsonlSink(folder, steps)
    for step in range(1, steps + 1):
        counts = [0.0] * (len(HISTOGRAM_EDGES) - 1)
        counts[len(counts) // 2], counts[200 + step], counts[700] = 900.0, 50.0, 3.0
        sink.log_histogram("rollout_corr/log_ratio", HISTOGRAM_EDGES, counts, step)
    sink.alert(HOSTILE, HOSTILE, 30)
    sink.close()
    long = [-3.2] * 4_000
    records = [
        token_record(2, gap=0.3, source=np.array([HOSTILE] * 3, dtype=object), kept=[False, *[True] * 8]),
        token_record(60, (4_000,), rollout_log_prob=long, old_log_prob=[*long[:-1], -0.2], why=HOSTILE),
    ]
    write_tokens(folder, records, {**PIECES_OF_DIGITS, 2: HOSTILE, 3: "\u202eabc", 4: "x" * 100_000})
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = run_folder(tmp_path_factory.mktemp("browser") / "run")
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture
def page(browser: Browser, report: Path) -> Browser:
    return opened(browser, report)


def opened(browser: Browser, path: Path) -> Browser:
    browser.console(), browser.requests()
    browser.resize(1200)
    browser.open(path)
    browser.wait_for(READY)
    return browser


def test_it_asks_for_nothing_and_complains_about_nothing(page, report):
    page.run("report.makeEverything()")
    time.sleep(0.2)
    assert page.console() == []
    assert [address for address in page.requests() if address != report.resolve().as_uri()] == []


def test_what_a_run_says_stays_text(page):
    page.run("report.makeEverything()")
    assert "hacked" not in page.run("return document.title")
    assert page.run("return document.querySelectorAll('main img, main script').length") == 0
    assert HOSTILE in page.run("return document.getElementById('samples').textContent")
    assert HOSTILE in page.run("return document.getElementById('alerts').textContent")
    assert HOSTILE in page.run("return document.getElementById('learning').textContent")


def test_the_policy_stops_a_script_that_got_in(page):
    page.run("document.body.insertAdjacentHTML('beforeend', arguments[0])", HOSTILE)
    page.run(
        "const s = document.createElement('script'); s.textContent = \"document.title='hacked'\"; "
        "document.body.append(s)"
    )
    time.sleep(0.2)
    assert "hacked" not in page.run("return document.title")
    assert any("Content Security Policy" in line for line in page.console())


def test_every_chart_has_drawn_something(page):
    page.run("report.makeEverything()")
    blank = page.run(
        """
        const blank = [];
        for (const canvas of document.querySelectorAll("figure canvas")) {
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const colours = new Set();
          for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 0) colours.add(pixels.slice(i, i + 3).join());
          if (colours.size < 4) blank.push(canvas.closest("figure").id);
        }
        return blank
        """  # noqa: E501
    )
    assert blank == []
    charts = page.run("return document.querySelectorAll('figure.chart').length")
    assert charts == page.run("return report.charts.size")
    assert charts > 15
    assert page.run("return document.querySelectorAll('#heat canvas').length") == 1


def test_charts_are_made_when_they_come_into_view(page):
    before = page.run("return report.charts.size")
    assert before < page.run("return document.querySelectorAll('figure.chart').length")
    page.run("document.querySelector('#ledger figure').scrollIntoView()")
    page.wait_for(f"report.charts.size > {before}")


def test_zoom_is_one_for_all_charts_and_ends_with_escape(page):
    page.run("report.makeEverything()")
    page.run("[...report.charts.values()][1].setScale('x', {min: 10, max: 20})")
    scales = "[...report.charts.values()].map((u) => [u.scales.x.min, u.scales.x.max].join())"
    page.wait_for(f"{scales}.every((text) => text === '10,20')")
    assert page.run("return report.zoom()") == [10, 20]
    page.run(
        "document.getElementById('chart-1').dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))"
    )
    page.wait_for(f"{scales}.every((text) => text !== '10,20')")


def test_the_keyboard_reaches_charts_and_their_numbers(page):
    page.run("report.makeEverything(); document.getElementById('chart-1').focus()")
    page.run(
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Home', bubbles: true}))"
    )
    words = page.run("return document.querySelector('#chart-1 .readout').textContent")
    first = healthy(steps=60)["critic/score/mean"][0]
    assert words.startswith("step 1: critic/score/mean 0.2")
    assert float(words.split()[-1]) == pytest.approx(first, rel=1e-3)
    page.run("document.querySelector('#chart-1 button').click()")
    assert page.run("return document.querySelectorAll('#chart-1 .numbers tbody tr').length") == 60
    reachable = page.run(
        "return document.querySelectorAll('figure[tabindex=\"0\"], nav a, figure button').length"
    )
    assert reachable > 40


def test_the_heat_map_says_what_a_cell_holds(page):
    page.run("report.makeEverything(); document.getElementById('heat').focus()")
    page.run("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))")
    words = page.run("return document.querySelector('#heat .readout').textContent")
    assert words.startswith("from step 59, log-ratio ")
    # The middle row lies between -1e-4 and 1e-4, and holds about the 900 tokens of every step.
    count = float(words.rpartition("about ")[2].split()[0])
    assert count == pytest.approx(900, rel=0.05)


def test_the_viewer_shows_tokens_and_what_happened_to_them(page):
    page.run("document.querySelectorAll('#token-view select')[2].value = '2'")
    page.run("document.querySelectorAll('#token-view select')[2].dispatchEvent(new Event('change'))")
    rows = "document.querySelectorAll('#token-view tbody tr')"
    assert page.run(f"return {rows}.length") == 3
    page.run(f"[...{rows}].find((row) => row.cells[2].textContent === '0').querySelector('button').click()")
    tokens = page.run(
        "return [...document.querySelectorAll('.token-text .token')].map((span) => span.textContent)"
    )
    assert tokens == ["0", HOSTILE, "\u202eabc", "x" * 200]
    assert page.run("return document.querySelectorAll('.token-text .rejected').length") == 1
    assert "hacked" not in page.run("return document.title")
    assert page.run("return document.querySelectorAll('#token-view img, #token-view script').length") == 0
    page.run("document.querySelector('.token-text').focus()")
    key = (
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: "
        "true}))"
    )
    page.run(key, "Home")
    words = page.run("return document.querySelector('#token-view .readout').textContent")
    assert words.startswith(
        "token 0 “0” (id 1), digits, log-prob of the engine -1, of the trainer -0.7, log-ratio 0.3"
    )
    assert "rejected" in words
    page.run(key, "ArrowRight")
    assert "log-ratio -0.3" in page.run("return document.querySelector('#token-view .readout').textContent")


def test_colours_tell_which_way_a_token_differs(page):
    choose = "const s = document.querySelector('#token-view select'); s.value = arguments[0]; "
    choose += "s.dispatchEvent(new Event('change'))"
    colours = (
        "return [...document.querySelectorAll('.token-text .token')].slice(-2).map((span) => "
        "span.style.backgroundColor)"
    )
    page.run("tokenView.state.row; document.querySelectorAll('#token-view .controls button')[1].click()")
    page.run("document.querySelectorAll('#token-view .controls button')[1].click()")
    shades = page.run(colours)
    assert shades[0] == ""
    assert shades[1].startswith("rgba(230, 120, 0")
    for name in (
        "weight",
        "what happened",
        "advantage",
        "entropy",
        "age",
        "probability",
        "log-ratio over expected noise",
    ):
        page.run(choose, name)
    assert page.console() == []


def test_long_rows_are_shown_in_parts(page):
    assert page.run("return document.querySelectorAll('.token-text .token').length") == 1_500
    page.run("document.querySelectorAll('#token-view .controls button')[1].click()")
    assert page.run("return document.querySelector('.token-text .token').dataset.token") == "1500"
    assert page.run("return document.querySelector('.strip').width") == 4_000


@pytest.mark.parametrize("width", [360, 1600])
def test_it_fits_narrow_and_wide_windows(page, width):
    page.resize(width)
    page.run("report.makeEverything()")
    page.wait_for(f"document.documentElement.scrollWidth <= {width}")


def test_a_verdict_leads_to_its_panel(page):
    targets = page.run(
        "return [...document.querySelectorAll('.verdict a, nav a')].map((a) => "
        "a.getAttribute('href').slice(1))"
    )
    assert page.run("return arguments[0].every((id) => document.getElementById(id))", targets)


def test_the_words_are_the_ones_of_the_console_and_of_json(page, report, capsys):
    capsys.readouterr()
    assert main(["report", str(report.parent), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    shown = page.run("return document.getElementById('verdict').textContent")
    assert verdict["headline"] in shown
    assert all(statement["sentence"] in shown for statement in verdict["statements"])


def test_without_scripts_the_words_and_drawings_are_there(browser, report):
    browser.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(report)
        shown = browser.command("DOM.getDocument", depth=-1)
        text = json.dumps(shown)
        assert text.count('"polyline"') > 15
        assert "Nothing is wrong" in text or "Worth a look" in text or "Something is wrong" in text
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", value=False)


def test_ten_thousand_steps_are_ready_in_two_seconds(browser, tmp_path):
    steps = 10_000
    columns = healthy(steps=steps)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for index in range(steps):
            file.write(
                json.dumps({"step": index + 1} | {name: values[index] for name, values in columns.items()})
                + "\n"
            )
    assert main(["report", str(tmp_path)]) == 0
    opened(browser, tmp_path / "report.html")
    assert browser.run("return performance.now()") < 5_000  # 2 s on an idle machine
    assert browser.console() == []
