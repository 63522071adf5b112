"""The page of another trainer's run: its names beside ours, what is missing, and what would record it."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from planted_series import healthy, write_run

from verl_rc.data.token_lines import TokenLines
from verl_rc.data.token_record import FIELDS
from verl_rc.insight.page import build_page
from verl_rc.insight.page.fields import fields_panel
from verl_rc.insight.run_folder import RunData, read_run
from verl_rc.insight.run_folder.trainers import LAYOUTS
from verl_rc.insight.run_folder.trainers.options import RECORDINGS
from verl_rc.insight.verdict import judge

PAGE = Path(__file__).parents[4] / "docs" / "your_trainer.md"


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
    rows = cells(fields_panel(read_run(trl_run(tmp_path, entropy=[1.0, 0.5], score=1.0))))
    assert rows["entropy"][:2] == ["entropies", "yes"]
    assert rows["old_log_prob"][:2] == ["old_per_token_logps", "yes"]
    assert rows["score"][1] == "yes"
    assert rows["sum_pi_squared"][1] == "missing"
    assert rows["sum_pi_squared"][3].endswith("record_tokens(trainer)")
    assert (rows["weight"][1], rows["weight"][3]) == ("missing", "use_vllm=True")
    assert (rows["engine"][1], rows["engine"][3]) == ("missing", "no option of it does")


def test_a_log_without_tokens_says_how_to_record_them(tmp_path: Path) -> None:
    run = read_run(trl_run(tmp_path))
    assert any("without which the cause of a gap cannot be told" in note for note in run.notes)
    assert any("record_tokens(trainer)" in note for note in run.notes)
    with_tokens = read_run(trl_run(tmp_path, entropy=[1.0, 0.5]))
    assert not any("without which the cause" in note for note in with_tokens.notes)


def test_an_unknown_trainer_is_told_of_token_records() -> None:
    rows = cells(fields_panel(RunData("x", Path("x"), "W&B export")))
    assert {row[3] for row in rows.values()} == {"token records (docs/token_record.md)"}


def test_the_page_has_title_and_names_of_its_trainer(tmp_path: Path) -> None:
    run = read_run(trl_run(tmp_path, entropy=[1.0, 0.5]))
    assert (run.trainer, run.their_names["critic/score/mean"]) == ("TRL", "reward")
    html = build_page([run], [judge(run)])
    assert f"<title>TRL run {tmp_path.stem}: report</title>" in html
    assert '"label":"reward (critic/score/mean)"' in html
    assert '<th scope="col">in TRL</th>' in html
    assert '<section id="fields">' in html
    assert "algorithm.rollout_correction.diagnostics=full" not in html
    assert not re.search(
        r"(?:trainer|algorithm)\.\w+\.?\w*=", html.partition("<main>")[2].partition("<script")[0]
    )
    without = read_run(trl_run(tmp_path / "without"))
    html = build_page([without], [judge(without)])
    assert '<a href="#fields">would record them</a>' in html


def test_the_page_of_an_own_run_has_none_of_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", healthy()))
    html = build_page([run], [judge(run)])
    assert '<section id="fields">' not in html
    assert "<title>run: report</title>" in html
    assert "algorithm.rollout_correction.diagnostics=full" in html


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.trainer)
def test_every_trainer_that_is_read_has_its_option(layout: object) -> None:
    assert layout.trainer in RECORDINGS


@pytest.mark.parametrize("trainer", RECORDINGS)
def test_options_name_fields_that_exist_and_stand_in_the_document(trainer: str) -> None:
    recording = RECORDINGS[trainer]
    assert {*recording.records, *recording.names, *recording.further} <= FIELDS.keys()
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {trainer}"))
    assert ("entropy" in recording.records or "entropy" in recording.further) == (
        "entropy" in row.split("|")[3]
    )
    assert ("version" in recording.records) == ("version" in row.split("|")[3])
    assert ("score" in recording.records) == ("score" in row.split("|")[3])
