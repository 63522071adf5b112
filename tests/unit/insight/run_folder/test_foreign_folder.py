"""A run's folder of somebody else: nothing outside it is shown or overwritten, and a report ends soon."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_tokens import token_record

from verl_rc.insight.page import ReportRequest, write_report
from verl_rc.insight.picture import draw_run
from verl_rc.insight.run_folder import NothingToReadError, RunData, Series, read_run, records
from verl_rc.insight.run_folder.records import Columns
from verl_rc.insight.verdict import verdict_of
from verl_rc.records.token_records.token_parquet import write_record

SECRET = "a-private-text-7f3a"
FILES = (
    "plan.txt",
    "resolved_config.yaml",
    "alerts.jsonl",
    "ending.json",
    "histograms.jsonl",
    "diagnosis.json",
    "tables/val.jsonl",
    "tokens/pieces.jsonl",
    "tokens/step_000001.parquet",
    "tokens/step_000002.jsonl",
    "metrics.jsonl",
)


def lines(*records: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def contents_of(name: str) -> str:
    """What the report shows of a file, with the secret."""
    row = {"step": 2, "response_mask": [1], "rollout_log_prob": [-0.5], "source": SECRET, "prompt_ids": [1]}
    texts = {
        "plan.txt": f"Plan\n{SECRET}\n",
        "resolved_config.yaml": f"trainer:\n  project_name: {SECRET}\n",
        "alerts.jsonl": lines({"step": 1, "title": "alert", "text": SECRET}),
        "ending.json": json.dumps({"status": 1, "reason": SECRET}),
        "tables/val.jsonl": lines({"step": 1, "input": SECRET, "output": "o", "score": 1.0}),
        "tokens/pieces.jsonl": lines({"step": 1, "pieces": [[3, SECRET, 0]]}),
        "tokens/step_000002.jsonl": lines({"token_record": 1, "trainer": "verl_rc"}, row),
        "metrics.jsonl": lines({"step": 1, "critic/score/mean": 0.5, f"val-core/{SECRET}/acc/mean@1": 0.5}),
    }
    return texts.get(name, SECRET)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "tokens").mkdir(parents=True)
    (folder / "tables").mkdir()
    (folder / "metrics.jsonl").write_text(
        lines(*({"step": step, "critic/score/mean": 0.5} for step in range(1, 4)))
    )
    (folder / "resolved_config.yaml").write_text("trainer:\n  nnodes: 1\n")
    write_record(folder / "tokens", token_record(1))
    return folder


def page_of(folder: Path) -> str:
    return write_report(ReportRequest(folder)).path.read_text()


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_a_link_out_of_the_folder_is_left_out_with_a_sentence(folder: Path, name: str) -> None:
    outside = folder.parent / "private"
    outside.mkdir()
    path, target = folder / name, outside / Path(name).name
    path.unlink(missing_ok=True)
    if path.suffix == ".parquet":
        record = token_record(1)
        record.rows["source"][:] = SECRET  # type: ignore[index]
        target = write_record(outside, record)
    else:
        target.write_text(contents_of(name))
    path.symlink_to(os.path.relpath(target, path.parent))
    try:
        page = page_of(folder)
    except NothingToReadError as error:
        page = str(error)
    assert SECRET not in page
    assert "leave" in page
    path.unlink()
    target.rename(path)  # the same file within the folder is shown
    shown = page_of(folder)
    assert "it leaves" not in shown
    assert "links that leave" not in shown
    assert SECRET in shown or name in ("histograms.jsonl", "diagnosis.json", "tokens/pieces.jsonl")


@pytest.mark.parametrize("name", ["tokens", "tables"])
def test_a_folder_that_is_a_link_out_of_the_run_is_left_out(folder: Path, name: str) -> None:
    outside = folder.parent / "private"
    (folder / name).rename(outside)
    (outside / "val.jsonl").write_text(contents_of("tables/val.jsonl"))
    (outside / "step_000002.jsonl").write_text(contents_of("tokens/step_000002.jsonl"))
    (folder / name).symlink_to(outside)
    page = page_of(folder)
    assert SECRET not in page
    assert "leave" in page


def test_a_run_that_is_named_by_a_link_is_read(folder: Path) -> None:
    (folder.parent / "alias").symlink_to(folder)
    (folder / "plan.txt").write_text(SECRET)
    assert SECRET in page_of(folder.parent / "alias")
    (folder.parent / "log.jsonl").symlink_to(folder / "metrics.jsonl")
    assert read_run(folder.parent / "log.jsonl").steps[-1] == 3


WRITERS: list[tuple[str, Callable[[Path], object]]] = [
    ("report.html", page_of),
    ("training_curves.png", draw_run),
]


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_what_is_planted_under_the_name_of_a_result_is_not_overwritten(
    folder: Path, name: str, write: Callable[[Path], object]
) -> None:
    (folder.parent / "private").write_text(SECRET)
    pid = os.getpid()
    for planted in (name, f".{name}.{pid}.partial", f"{name}.partial", f".{name}.partial"):
        (folder / planted).symlink_to("../private")
    write(folder)
    assert (folder.parent / "private").read_text() == SECRET
    assert not (folder / name).is_symlink()


def test_aliases_of_a_configuration_are_left_out(folder: Path) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
    )
    (folder / "resolved_config.yaml").write_text(bomb)
    run = read_run(folder)
    assert not run.settings
    assert any("resolved_config.yaml" in note and "without aliases" in note for note in run.notes)


def test_files_of_holes_are_not_read(folder: Path) -> None:
    """They take no place on the disk, and would be read for hours."""
    for name in ("alerts.jsonl", "histograms.jsonl", "tables/val.jsonl", "plan.txt", "tokens/pieces.jsonl"):
        with (folder / name).open("wb") as file:
            file.truncate(1 << 42)
    with (folder / "tokens" / "step_000002.jsonl").open("wb") as file:
        file.truncate(1 << 42)
    run = read_run(folder)
    assert run.steps[-1] == 3
    assert sum("at most 16 GiB" in note for note in run.notes) >= 4


class Counted(list[float]):
    """A list that counts the values that are taken out of it."""

    taken = 0

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        Counted.taken += len(value) if isinstance(key, slice) else 1
        return value


def test_the_verdict_on_a_collapse_takes_each_value_a_few_times() -> None:
    def taken(steps: int) -> int:
        values = Counted([1.0] * (steps * 2 // 3) + [0.0] * (steps - steps * 2 // 3))
        run = RunData("x", Path(), "verl_rc run", range(1, steps + 1))
        run.series = {"critic/score/mean": Series(range(1, steps + 1), values)}
        run._finite = dict(run.series)
        Counted.taken = 0
        assert "collapse" in verdict_of(run).headline
        return Counted.taken

    assert taken(4_000) < 4.5 * taken(1_000)


def test_a_log_that_goes_back_in_every_line_is_read_in_its_own_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand cuts of a thousand columns each are a million."""
    cuts = []
    true = records.bisect_left
    monkeypatch.setattr(records, "bisect_left", lambda *given: (cuts.append(1), true(*given))[1])
    columns = Columns([(5, {str(name): 1.0 for name in range(1_000)})])
    for number in range(1_000):
        columns.add(4 - number % 3, {"a": float(number)})
    series = columns.series()
    assert len(cuts) < 10_000
    assert list(series) == ["a"]
    assert list(columns.steps) == [2, 4] == list(series["a"].steps)
