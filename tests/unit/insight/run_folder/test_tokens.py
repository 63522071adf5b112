"""Token records of a run's folder: rows to show, worst tokens, profiles; and what is said about records that
cannot be read."""

import math
from pathlib import Path

import numpy as np
import pytest
from planted_series import healthy, write_run
from recorded_tokens import token_record, write_tokens

from verl_rc.cli import main
from verl_rc.insight.run_folder import NothingToReadError, read_run
from verl_rc.insight.run_folder.profiles import Bar, Profiles
from verl_rc.insight.run_folder.token_data import TokenData
from verl_rc.insight.run_folder.token_files import token_source
from verl_rc.insight.run_folder.tokens import read_tokens
from verl_rc.insight.verdict.gap import gap_statements
from verl_rc.records.token_records.token_lines import TokenLines
from verl_rc.records.token_records.token_parquet import record_path


def tokens_of(folder: Path, **arguments: int) -> TokenData:
    source = token_source(folder)
    assert source is not None
    data = read_tokens(source, [], **arguments)
    assert data is not None
    return data


def bars(profiles: Profiles | None, title: str) -> dict[str, Bar]:
    assert profiles is not None
    (found,) = (profile for profile in profiles.profiles if profile.title.startswith(title))
    return {bar.label: bar for bar in found.bars}


def test_the_newest_record_comes_first_then_the_largest_gaps(tmp_path: Path) -> None:
    write_tokens(tmp_path, [token_record(1, gap=0.3), token_record(2, gap=0.9), token_record(10, gap=0.01)])
    data = tokens_of(tmp_path, most_rows=5)
    assert data.steps == [1, 2, 10]
    assert data.rows_recorded == 9
    # Sums of squares are gap^2 (i + 1)^2 n: row 2 of every record has the largest.
    assert [(row.step, row.cells["row"]) for row in data.rows] == [(10, 4), (10, 2), (2, 4), (2, 2), (2, 0)]
    assert data.rows[2].squares == pytest.approx(0.9**2 * 9 * 3, rel=1e-5)
    assert data.rows[0].prompt is not None
    assert data.rows[0].prompt.tolist() == [11, 3]


def test_the_worst_tokens_of_all_records(tmp_path: Path) -> None:
    write_tokens(tmp_path, [token_record(1, gap=0.1), token_record(2, gap=0.5)])
    worst = tokens_of(tmp_path).worst
    assert {(token.step, token.row, token.position) for token in worst[:3]} == {
        (2, 4, 0),
        (2, 4, 1),
        (2, 4, 2),
    }
    assert abs(worst[0].old_log_prob - worst[0].rollout_log_prob) == pytest.approx(1.5, abs=1e-5)
    assert all(token.token == token.position + 1 for token in worst[:3])
    assert len(worst) == 18


def test_tokens_that_the_policy_did_not_sample_are_no_gap(tmp_path: Path) -> None:
    mask = [True, False, True, True, True, True, False, False, False]
    write_tokens(tmp_path, [token_record(1, (9,), chosen_by=["random"], response_mask=mask, gap=0.2)])
    data = tokens_of(tmp_path)
    assert len(data.worst) == 5
    assert data.profiles is not None
    assert data.profiles.tokens == 5
    assert data.rows[0].squares == pytest.approx(5 * 0.04, rel=1e-4)
    turns = bars(data.profiles, "Turn")
    assert {label: bar.tokens for label, bar in turns.items()} == {"1": 1, "2": 4}


def test_profiles_are_of_random_rows_alone(tmp_path: Path) -> None:
    write_tokens(tmp_path, [token_record(3, gap=0.1)])
    profiles = tokens_of(tmp_path).profiles
    assert profiles is not None
    assert (profiles.rows, profiles.tokens, profiles.has_noise, profiles.floor) == (2, 6, True, None)
    # Row 0: four tokens of 0.1, row 1: two of 0.2; every g is 0.25.
    position = bars(profiles, "Position")
    assert position["0"].size == pytest.approx(math.sqrt((0.01 + 0.04) / 0.5), rel=1e-3)
    assert position["1 to 3"].size == pytest.approx(math.sqrt((3 * 0.01 + 0.04) / 1.0), rel=1e-3)
    assert position["0"].share_of_tokens == pytest.approx(1 / 3)
    assert position["0"].share_of_gap == pytest.approx(0.05 / 0.12, rel=1e-4)
    assert bars(profiles, "Data source").keys() == {"digits"}
    assert bars(profiles, "Kind").keys() == {"digits"}
    assert bars(profiles, "Age").keys() == {"0"}


def test_the_floor_is_that_of_the_first_two_steps(tmp_path: Path) -> None:
    write_tokens(tmp_path, [token_record(1, gap=0.1), token_record(2, gap=0.1), token_record(50, gap=3.0)])
    profiles = tokens_of(tmp_path).profiles
    assert profiles is not None
    assert profiles.floor == pytest.approx(math.sqrt(0.12 / 1.5), rel=1e-3)


def test_without_noise_scales_sizes_are_root_mean_squares(tmp_path: Path) -> None:
    write_tokens(tmp_path, [token_record(3, gap=0.1, sum_pi_squared=None)])
    profiles = tokens_of(tmp_path).profiles
    assert profiles is not None
    assert not profiles.has_noise
    assert bars(profiles, "Position")["0"].size == pytest.approx(math.sqrt((0.01 + 0.04) / 2), rel=1e-3)


def test_old_tokens_stand_apart_and_bands_hold_the_value(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    records = []
    for step in range(3, 23):
        logs = 0.1 * generator.standard_normal(320)
        age = np.repeat([0, 4], 160)
        rollout = np.full(320, -2.5)
        records.append(
            token_record(
                step,
                [16] * 20,
                chosen_by=["random"] * 20,
                rollout_log_prob=rollout,
                old_log_prob=rollout + logs * (1 + age),
                version=step - 1 - age,
            )
        )
    write_tokens(tmp_path, records)
    age = bars(tokens_of(tmp_path).profiles, "Age")
    assert set(age) == {"0", "3 to 4"}
    for label, expected in (("0", 0.2), ("3 to 4", 1.0)):  # 0.1 (1 + age) / sqrt(g)
        assert age[label].low < age[label].size < age[label].high
        assert age[label].size == pytest.approx(expected, rel=0.05)
        assert age[label].high - age[label].low < 0.1 * expected


@pytest.mark.parametrize("facts", [{}, {"current_version": None}])
def test_ages_count_from_the_newest_weights_where_no_fact_says_which_are_current(
    tmp_path: Path, facts: dict[str, None]
) -> None:
    """Numbers of weights of another trainer need not be those of steps; and its facts may be null."""
    for step in (1, 2):
        with TokenLines(tmp_path / f"step_{step:06d}.jsonl", trainer="mine", **facts) as lines:
            lines.write(step, [1, 1], [-1.0, -2.0], [-1.1, -2.1], version=100 + step)
            lines.write(step, [1], [-1.0], [-1.4], version=98 + step)
    run = read_run(tmp_path)
    assert run.tokens is not None
    assert {label: bar.tokens for label, bar in bars(run.tokens.profiles, "Age").items()} == {"0": 4, "2": 2}
    assert [row.tokens["age"].tolist() for row in run.tokens.rows if row.step == 2] == [[2], [0, 0]]
    assert run.get("rollout_corr/token_age_mean").values == [pytest.approx(2 / 3)] * 2


def test_log_probs_that_are_not_finite_are_shown_and_counted_nowhere(tmp_path: Path) -> None:
    old = [-0.5, -np.inf, np.nan, -0.5]
    write_tokens(tmp_path, [token_record(1, (4,), chosen_by=["random"], old_log_prob=old)])
    data = tokens_of(tmp_path)
    assert data.profiles is not None
    assert data.profiles.tokens == 2
    assert math.isinf(data.rows[0].squares)
    assert {token.position for token in data.worst[:2]} == {1, 2}


def test_where_the_trainer_s_log_probs_are_not_known_nothing_is_compared(tmp_path: Path) -> None:
    write_tokens(tmp_path, [token_record(1, old_log_prob=None)])
    data = tokens_of(tmp_path)
    assert data.profiles is None
    assert data.worst == []
    assert len(data.rows) == 3


def test_records_without_rows_and_rows_without_tokens(tmp_path: Path) -> None:
    write_tokens(tmp_path, [token_record(1, (0, 0)), token_record(2, ())])
    data = tokens_of(tmp_path)
    assert data.rows_recorded == 2


def test_a_damaged_record_is_left_out_and_named(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path, [token_record(1), token_record(2)])
    record_path(folder, 2).write_bytes(b"PAR1 no parquet")
    (folder / "step_12.parquet").write_bytes(b"no record")
    (folder / ".step_000003.parquet.9.partial").write_bytes(b"half")
    source, notes = token_source(tmp_path), list[str]()
    assert source is not None
    data = read_tokens(source, notes)
    assert data is not None
    assert data.steps == [1]
    assert any("1 token record(s) cannot be read and are left out: step 2 (" in note for note in notes)


def test_a_rank_s_file_that_is_missing_is_named_and_one_without_facts_loses_no_row(tmp_path: Path) -> None:
    for step, rank in ((1, 0), (1, 1), (2, 1)):
        with TokenLines(tmp_path / f"step_{step:06d}.rank_{rank}.jsonl", trainer="mine") as lines:
            for _ in range(2):
                lines.write(step, [1], [-1.0], [-1.1])
    facts, *rows = (tmp_path / "step_000001.rank_0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "step_000001.rank_0.jsonl").write_text("".join([facts[:9] + "\n", *rows]))
    run = read_run(tmp_path)
    assert run.tokens is not None
    assert run.tokens.rows_recorded == 6
    assert "1 step(s) lack the token file of a rank that other steps have: 2." in run.notes
    assert any("step_000001.rank_0.jsonl: 1 line(s)" in note for note in run.notes)


def test_a_field_that_some_rows_lack_is_left_out_and_named(tmp_path: Path) -> None:
    for step in (1, 2):
        with TokenLines(tmp_path / f"step_{step:06d}.jsonl", trainer="mine") as lines:
            lines.write(step, [1], [-1.0], [-1.1], score=1.0, entropy=[0.5])
            lines.write(step, [1], [-1.0], [-1.1], score=None if step == 2 else 0.0, entropy=[0.5])
    run = read_run(tmp_path)
    assert run.get("critic/score/mean").by_step() == {1: 0.5}
    assert run.get("actor/entropy").by_step() == {1: 0.5, 2: 0.5}
    assert [note for note in run.notes if "left out" in note] == [
        "score is left out of 1 step(s): some of their rows lack it."
    ]


def test_pieces_come_from_whole_lines(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path, [token_record(1)])
    with (folder / "pieces.jsonl").open("a") as file:
        file.write(
            '{"step": 2, "pieces": [[90, "ninety", 0], ["x", 1], 7]}\n{"step": 3, "pieces": [[91, "half'
        )
    pieces = tokens_of(tmp_path).pieces
    assert pieces[90] == "ninety"
    assert 91 not in pieces


def test_a_damaged_line_of_pieces_is_named(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path, [token_record(1)])
    lines = (folder / "pieces.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "pieces.jsonl").write_bytes(b"".join([*lines, b"\0\0\0\n", *lines]))
    notes = read_run(tmp_path).notes
    assert f"pieces.jsonl: 1 line(s) are no records and are left out: {len(lines) + 1}." in notes


def test_a_run_without_records_has_none(tmp_path: Path) -> None:
    assert token_source(tmp_path) is None
    assert read_run(write_run(tmp_path / "run", healthy(5))).tokens is None


def test_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", healthy(20))
    write_tokens(run, [token_record(1), token_record(10), token_record(20)])
    whole, cut = read_run(run), read_run(run, 5, 15)
    assert whole.tokens is not None
    assert cut.tokens is not None
    assert (whole.tokens.steps, cut.tokens.steps) == ([1, 10, 20], [10])


def write_row(folder: Path, step: int, **changed: object) -> Path:
    """A file of one row, of another trainer."""
    row = {"response_mask": [1, 1], "rollout_log_prob": [-1.0, -0.5], "old_log_prob": [-1.1, -0.4]}
    path = folder / f"step_{step:06d}.jsonl"
    with TokenLines(path, trainer="mine") as lines:
        lines.write(step, **row | changed)
    return path


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"old_log_prob": [-1.0]}, "response_mask has 2, old_log_prob 1"),
        ({"rollout_log_prob": [0.5, 0.5]}, "rollout_log_prob must be at most 0; .* sampled tokens have more"),
        (
            {"rollout_log_prob": [0.0, 0.0]},
            "rollout_log_prob is 0 for every sampled token: it was not computed",
        ),
        ({"response_mask": [0, 0]}, "response_mask must mark the tokens"),
    ],
)
def test_rows_that_are_none_say_why(tmp_path: Path, changed: dict[str, object], why: str) -> None:
    write_row(tmp_path, 1, **changed)
    with pytest.raises(NothingToReadError, match=why):  # no step is left, and the user reads why
        read_run(tmp_path)


def test_log_probs_of_the_trainer_that_were_skipped_are_none(tmp_path: Path) -> None:
    write_row(tmp_path, 1, old_log_prob=[0.0, 0.0])
    run = read_run(tmp_path)
    assert run.tokens is not None
    assert "old_log_prob" not in run.tokens.rows[0].tokens
    assert any("hold no log-probs of the trainer" in note for note in run.notes)
    (gap,) = gap_statements(run)
    assert "its token records lack the trainer's (old_log_prob)" in gap.text


@pytest.mark.parametrize("text", ['{"token_record": 1, "trainer": "mine"}\n', ""])
def test_a_file_of_facts_alone_and_one_of_nothing_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "step_000001.rank_0.jsonl").write_text(text)
    with pytest.raises(NothingToReadError, match=r"every row of step 1 must have|no facts"):
        read_run(tmp_path)


def test_of_many_gigabytes_some_steps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(write_row(tmp_path, step).stat().st_size for step in range(1, 31))
    monkeypatch.setattr("verl_rc.insight.run_folder.token_files.MOST_BYTES", total // 9)
    source = token_source(tmp_path)
    assert source is not None
    assert source.steps == [1, 11, 21, 30]
    assert any("4 of 30 steps were read" in note for note in source.notes)


def test_raw_log_probs_at_another_temperature_are_said_first(tmp_path: Path) -> None:
    with TokenLines(
        tmp_path / "x.jsonl", trainer="mine", temperature=0.7, logprobs_mode="raw_logprobs"
    ) as lines:
        lines.write(1, [1, 1], [-1.0, -2.0], [-1.1, -2.1])
    first = gap_statements(read_run(tmp_path / "x.jsonl"))[0]
    assert first.cause == "raw log-probs at another temperature"
    assert first.text.startswith("By its records the engine samples at temperature 0.7")


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_a_run_of_ours_with_records_of_another_trainer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = write_run(tmp_path / "run", healthy())
    write_row(folder / "tokens", 1)
    assert main([command, str(folder)]) == 2
    said = "must hold the files of one trainer; it holds a run of verl_rc and token records of mine. Pass a"
    assert said in " ".join(capsys.readouterr().err.split())
