"""The panel of tokens: its numbers are those of the records, its texts stay texts, and what is missing is
named."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_series import healthy, planted, write_run
from recorded_tokens import PIECES_OF_DIGITS, token_record, write_tokens

from verl_rc.insight.page import build_page
from verl_rc.insight.page.tokens import rows_that_fit, tokens_panel
from verl_rc.insight.run_folder import RunData, read_run
from verl_rc.insight.run_folder.foreign import read_foreign
from verl_rc.insight.verdict import verdict_of

HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\">"


def run_with(folder: Path, *records: Any, pieces: dict[int, str] | None = None) -> RunData:
    run = write_run(folder / "run", healthy(20))
    write_tokens(run, records or [token_record(2), token_record(10, gap=0.4)], pieces or PIECES_OF_DIGITS)
    return read_run(run)


def page_of(run: RunData, **options: Any) -> str:
    return build_page(run, verdict_of(run), **options)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])["tokens"]
    return data


def unpacked(text: str, kind: str) -> list[float]:
    values: list[float] = np.frombuffer(base64.b64decode(text), kind).tolist()
    return values


def test_every_number_of_a_row_is_the_records(tmp_path: Path) -> None:
    record = token_record(
        10, entropy=np.arange(9) / 4, weight=[1.0] * 9, advantage=[0.25] * 4 + [-1.5] * 5, version=[7] * 9
    )
    data = data_of(page_of(run_with(tmp_path, record)))
    by_row = {row["row"]: row for row in data["rows"]}
    assert by_row.keys() == {0, 2, 4}
    for index in range(3):
        place, row = record.span(index), by_row[2 * index]
        assert unpacked(row["rollout"], "<f4") == record.tokens["rollout_log_prob"][place].tolist()
        assert unpacked(row["train"], "<f4") == record.tokens["old_log_prob"][place].tolist()
        assert unpacked(row["entropy"], "<f2") == record.tokens["entropy"][place].tolist()
        assert row["weight"] == 1.0
        assert row["advantage"] == [0.25, -1.5, -1.5][index]
        assert row["age"] == 2  # step 10 trains weights of version 9
        ids = [data["pieces"][place][0] for place in unpacked(row["ids"], "<u2")]
        assert ids == record.tokens["response_ids"][place].tolist()
        assert row["score"] == float(index)
    texts = dict(map(tuple, data["pieces"]))
    assert {texts[token] for token in (1, 2)} == {"0", "1"}


@pytest.mark.parametrize(
    ("correction", "weights", "cut"),
    [
        ({"rollout_is_threshold": 2.0}, [0.5, 2.0, 1.0], [False, True, False]),
        ({"rollout_is_threshold": "0.5_2.0"}, [0.5, 0.0, 1.0], [False, True, False]),
        (
            {"rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
            [0.5, 2.0, 1.0],
            [False, False, False],
        ),
        (None, [0.5, 2.0, 1.0], [False, False, False]),
    ],
)
def test_tokens_that_were_cut_rejected_or_written_by_tools(
    tmp_path: Path, correction: Any, weights: list[float], cut: list[bool]
) -> None:
    record = token_record(
        10,
        (4,),
        weight=[*weights, 2.0],
        kept=[True, True, False, True],
        response_mask=[True, True, True, False],
        facts={"correction": correction},
    )
    (row,) = data_of(page_of(run_with(tmp_path, record)))["rows"]
    flags = [int(flag) for flag in unpacked(row["flags"], "u1")]
    assert [bool(flag & 1) for flag in flags] == [True, True, True, False]
    assert [bool(flag & 2) for flag in flags] == [True, True, False, True]
    assert [bool(flag & 4) for flag in flags] == [*cut, False]


def test_turns_have_their_tokens_rewards_and_waits(tmp_path: Path) -> None:
    """Two rows of two turns and one of a turn; an environment's token lies between two turns."""
    mask = [True, True, False, True, True, True, True, False, True]
    rewards = [0, -0.5, 0, 1.0, 0, 2.0, -1.0, 0, 0.5]
    waits = [0, 0.25, 0, 0.5, 0, 0.75, 1.25, 0, 0]
    record = token_record(10, response_mask=mask, turn_reward=rewards, turn_wait=waits)
    page = page_of(run_with(tmp_path, record))
    turns = {row["row"]: row["turns"] for row in data_of(page)["rows"]}
    assert turns == {
        0: {"tokens": [2, 1], "rewards": [-0.5, 1.0], "waits": [0.25, 0.5]},
        2: {"tokens": [2], "rewards": [2.0], "waits": [0.75]},
        4: {"tokens": [1, 1], "rewards": [-1.0, 0.5], "waits": [1.25, 0]},
    }
    lines = re.findall(r"<tr><td>(.*?)</td></tr>", page.partition("Turns of the rows of step 10")[2])
    assert [line.split("</td><td>") for line in lines[:2]] == [
        ["1", "3", "1.667", "0.1667", "0.75"],
        ["2", "2", "1", "0.75", "0.25"],
    ]


def test_records_without_an_environment_have_turns_of_the_mask_alone(tmp_path: Path) -> None:
    page = page_of(run_with(tmp_path, token_record(10, response_mask=[True, False, True, True] + [True] * 5)))
    assert {row["row"]: row["turns"] for row in data_of(page)["rows"]} == {
        0: {"tokens": [1, 2]},
        2: {"tokens": [2]},
        4: {"tokens": [3]},
    }
    assert "Turns of the rows" not in page


class Tags(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.add(tag)


def test_what_tokens_say_stays_text(tmp_path: Path) -> None:
    pieces = {**PIECES_OF_DIGITS, 1: HOSTILE, 2: "\u202e", 3: "x" * 100_000}
    record = token_record(10, source=np.array([HOSTILE] * 3, dtype=object))
    page = page_of(run_with(tmp_path, record, pieces=pieces))
    assert HOSTILE not in page
    assert "img" not in Tags(page).found
    assert HOSTILE in [text for _, text in data_of(page)["pieces"]]
    assert "This page holds texts of prompts and responses." in page


def test_pictures_of_rows_are_in_the_page_once(tmp_path: Path) -> None:
    """Names that are no SHA-256 are not looked for."""
    one, other = "a" * 64, "b" * 64
    cells = np.array([one, f"{one} {other}", "../../secret"], dtype=object)
    run_with(tmp_path, token_record(10, pictures=cells))
    folder = tmp_path / "run" / "tokens" / "pictures"
    folder.mkdir()
    for name, data in ((one, b"one"), (other, b"other")):
        (folder / name).write_bytes(data)
    run = read_run(tmp_path / "run")
    data = data_of(page_of(run))
    assert sorted(map(tuple, (row["pictures"] for row in data["rows"]))) == [(), (one,), (one, other)]
    assert {name: base64.b64decode(text) for name, text in data["pictures"].items()} == {
        one: b"one",
        other: b"other",
    }
    assert data_of(page_of(run, with_text=False))["pictures"] == {}


def test_texts_can_be_kept_out(tmp_path: Path) -> None:
    run = run_with(tmp_path, pieces={**PIECES_OF_DIGITS, 1: "PRIVATE-WORDS"})
    assert "PRIVATE-WORDS" in page_of(run)
    without = page_of(run, with_text=False)
    assert "PRIVATE-WORDS" not in without
    data = data_of(without)
    assert data["pieces"] == []
    assert {row["ids"] for row in data["rows"]} == {None}
    assert "This page holds no text of prompts or responses." in without


def test_records_without_text(tmp_path: Path) -> None:
    page = page_of(run_with(tmp_path, token_record(10, response_ids=None, prompts=None)))
    assert "a box stands for a token" in page
    assert "Tokens that differ most" in page


def test_what_is_missing_is_named_with_its_key(tmp_path: Path) -> None:
    own, _ = tokens_panel(planted({}), True, 100)
    assert "trainer.token_records.enable=True" in own
    log = tmp_path / "verl.log"
    log.write_text("step:1 - actor/pg_loss:0.5 - critic/score/mean:0.25\n")
    foreign = read_foreign(log)
    assert foreign is not None
    assert "#fields" in tokens_panel(foreign, True, 100)[0]
    bypass = run_with(tmp_path, token_record(10, old_log_prob=None))
    assert "bypass_mode=False" in tokens_panel(bypass, True, 1_000)[0]


def test_rows_fit_into_what_a_page_may_hold(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    assert run.tokens is not None
    # Rows of step 10 have 3, 2 and 4 tokens after prompts of 2, those with the largest gaps first.
    assert [len(rows_that_fit(run.tokens.rows, most)) for most in (4, 5, 9, 15, 1_000)] == [0, 1, 2, 3, 6]
    small = page_of(replace(run, samples=[]), max_megabytes=0.1)
    assert "rows of tokens" in small
    assert "Tokens that differ most" in small


def test_profiles_are_bars_with_their_numbers(tmp_path: Path) -> None:
    page = page_of(run_with(tmp_path, token_record(1), token_record(2), token_record(10, gap=0.4)))
    assert page.count('<rect class="bar"') >= 2
    assert "12 tokens of 6 rows" not in page  # of each record two rows of six tokens are random
    assert "18 tokens of 6 rows" in page
