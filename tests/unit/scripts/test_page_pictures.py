"""Pictures of a report for the documents: they show the section that they are named after, are small, and
stand there."""

from pathlib import Path

import browser
import page_pictures
import pytest
from page_pictures import MOST_BYTES, SECTIONS, WIDTH, write_pictures
from PIL import Image
from planted_series import healthy, write_run
from recorded_tokens import token_record, write_tokens
from small_runs import ROOT

needs_browser = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(not (browser.DRIVER and browser.CHROMIUM), reason=browser.REASON),
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_browser) for name in SECTIONS])
def test_a_picture_shows_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(page_pictures, "SECTIONS", {name: SECTIONS[name]})
    run = write_run(tmp_path / "run", healthy())
    write_tokens(run, [token_record(2), token_record(40)])
    (path,) = write_pictures(run, tmp_path)
    assert path.name == f"{name}.png"
    assert path.stat().st_size < MOST_BYTES
    with Image.open(path) as image:
        assert image.width == WIDTH
        assert 100 < image.height <= SECTIONS[name][1]
        assert len(image.convert("L").getcolors()) > 10  # letters, not an empty page


@pytest.mark.parametrize("name", SECTIONS)
def test_the_documents_have_every_picture(name: str) -> None:
    path = ROOT / "docs" / "images" / f"{name}.png"
    assert path.stat().st_size < MOST_BYTES
    assert f"images/{name}.png" in (ROOT / "docs" / "see_why.md").read_text()


def test_without_a_browser_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_pictures, "CHROMIUM", None)
    monkeypatch.setattr("sys.argv", ["page_pictures", "run"])
    assert page_pictures.main() == 1
    assert "apt-get install chromium" in capsys.readouterr().err
