"""What ``verl-rc diagnose`` says without replays."""

from pathlib import Path

from planted_series import healthy, write_run

from verl_rc.insight.diagnosis import DiagnosisRequest, diagnose


def test_what_of_a_run_was_not_read_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path, healthy(steps=5))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no record\n")
    lines = list(diagnose(DiagnosisRequest(folder)).lines())
    assert "  metrics.jsonl: 1 line(s) are no records and are left out: 6." in lines


def test_a_run_that_only_validates_has_no_gap_and_hears_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"val-core/digits/acc/mean@1": [0.5]})
    (found,) = diagnose(DiagnosisRequest(folder)).statements
    assert (found.cause, found.level) == ("not measured", "unknown")
