"""``python -m scripts.documents``: pages that say what the code says now."""

import shutil
from pathlib import Path

import pytest
from documents import __main__ as command
from documents import pages
from documents.pages import stale_pages, write_pages
from recipe_arguments import ROOT

QUICKLY_WRITTEN = ("docs/metrics.md", "configs/reference.yaml", "docs/see_why.md")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some of the generated pages by themselves, as if there were no others."""
    for folder in ("docs", "configs"):
        (tmp_path / folder).mkdir()
    for kind in ("PAGES", "TABLES"):
        known = getattr(pages, kind)
        monkeypatch.setattr(pages, kind, {name: known[name] for name in known if name in QUICKLY_WRITTEN})
    for name in QUICKLY_WRITTEN:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_pages_are_current() -> None:
    assert stale_pages(ROOT) == [], "run: python -m scripts.documents"


def test_a_page_that_is_stale_or_missing_is_written(checkout: Path) -> None:
    with (checkout / "docs/metrics.md").open("a") as page:
        page.write("x\n")
    (checkout / "configs/reference.yaml").unlink()
    assert stale_pages(checkout) == ["configs/reference.yaml", "docs/metrics.md"]
    assert write_pages(checkout) == ["configs/reference.yaml", "docs/metrics.md"]
    assert stale_pages(checkout) == []
    assert (checkout / "docs/metrics.md").read_text() == (ROOT / "docs/metrics.md").read_text()


def test_a_table_in_a_page_is_written_and_the_text_around_it_stays(checkout: Path) -> None:
    page, text = checkout / "docs/see_why.md", (ROOT / "docs/see_why.md").read_text()
    page.write_text(text.replace("| 2 | lag is not 0 |", "| 2 | lag is 0 |") + "By hand.\n")
    assert stale_pages(checkout) == ["docs/see_why.md"]
    assert write_pages(checkout) == ["docs/see_why.md"]
    assert page.read_text() == text + "By hand.\n"


def test_the_command_checks_and_writes(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "ROOT", checkout)
    assert command.main(["--check"]) == 0
    (checkout / "configs/reference.yaml").write_text("old\n")
    assert command.main(["--check"]) == 1
    assert capsys.readouterr().out == "configs/reference.yaml is stale: run python -m scripts.documents\n"
    assert (checkout / "configs/reference.yaml").read_text() == "old\n"
    assert command.main([]) == 0
    assert capsys.readouterr().out == "configs/reference.yaml written\n"
    assert command.main(["--check"]) == 0
