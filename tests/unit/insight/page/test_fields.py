"""The page of another trainer's run: its names beside ours, what is missing, and what would record it."""

import json
import re
from html import unescape
from pathlib import Path

from planted_series import healthy, write_run

from verl_rc.insight.page import build_page
from verl_rc.insight.page.fields import fields_panel
from verl_rc.insight.run_folder import RunData, read_run
from verl_rc.insight.verdict import verdict_of
from verl_rc.records.token_records.token_lines import TokenLines


def trl_run(folder: Path, **fields: object) -> Path:
    """Metrics of TRL, and tokens with both log-probs and ``fields``."""
    folder.mkdir(exist_ok=True)
    history = [{"step": step, "reward": 0.1 * step, "grad_norm": 0.5} for step in (1, 2, 3)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    if fields:
        with TokenLines(folder / "tokens" / "step_000001.rank_0.jsonl", trainer="TRL") as lines:
            lines.write(1, [1, 1], [-1.0, -0.5], [-1.1, -0.4], **fields)
    return folder


def cells(html: str) -> dict[str, list[str]]:
    """The rows of the panel by field, as text."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    texts = [
        [unescape(re.sub("<.*?>", "", cell)) for cell in re.findall("<td>(.*?)</td>", row)] for row in rows
    ]
    return {row[0]: row[1:] for row in texts if row}


def test_what_is_missing_and_what_would_record_it(tmp_path: Path) -> None:
    panel = fields_panel(read_run(trl_run(tmp_path, entropy=[1.0, 0.5], score=1.0)))
    recorded = {name: row[0] for name, row in cells(panel).items()}
    assert {name for name, is_there in recorded.items() if is_there == "yes"} == {
        "rollout_log_prob",
        "old_log_prob",
        "entropy",
        "score",
    }
    assert recorded["sum_pi_squared"] == "missing"
    assert "record_tokens(trainer)" in panel


def test_a_log_without_tokens_says_how_to_record_them(tmp_path: Path) -> None:
    run = read_run(trl_run(tmp_path))
    assert any("without which the cause of a gap cannot be told" in note for note in run.notes)
    assert any("record_tokens(trainer)" in note for note in run.notes)
    with_tokens = read_run(trl_run(tmp_path, entropy=[1.0, 0.5]))
    assert not any("without which the cause" in note for note in with_tokens.notes)


def test_an_unknown_trainer_is_told_of_token_records() -> None:
    panel = fields_panel(RunData("x", Path("x"), "W&B export"))
    assert "its trainer writes token records</code> (docs/token_record.md)" in panel


def test_the_page_has_title_and_names_of_its_trainer(tmp_path: Path) -> None:
    run = read_run(trl_run(tmp_path, entropy=[1.0, 0.5]))
    assert (run.trainer, run.their_names["critic/score/mean"]) == ("TRL", "reward")
    html = build_page(run, verdict_of(run))
    assert f"<title>TRL run {tmp_path.stem}: report</title>" in html
    assert '"label":"reward (critic/score/mean)"' in html
    assert '<section id="fields">' in html
    assert "algorithm.rollout_correction.diagnostics=full" not in html
    assert not re.search(
        r"(?:trainer|algorithm)\.\w+\.?\w*=", html.partition("<main>")[2].partition("<script")[0]
    )
    without = read_run(trl_run(tmp_path / "without"))
    html = build_page(without, verdict_of(without))
    assert '<a href="#fields">would record them</a>' in html


def test_the_page_of_an_own_run_has_none_of_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", healthy()))
    html = build_page(run, verdict_of(run))
    assert '<section id="fields">' not in html
    assert "<title>run: report</title>" in html
    assert "algorithm.rollout_correction.diagnostics=full" in html
