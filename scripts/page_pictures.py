"""Pictures of a run's report for the documents: python scripts/page_pictures.py RUN [--output docs/images]

Writes report_verdict.png and report_tokens.png, each below 150 kB, with headless Chromium; without one it
says so and exits 1.
"""

import argparse
import base64
import io
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # they open the page, too

from browser import CHROMIUM, DRIVER, REASON, Browser, open_browser
from PIL import Image

from verl_rc.insight.page import Request, write_report

ROOT = Path(__file__).resolve().parents[1]
SECTIONS: Mapping[str, tuple[str, int]] = {
    "report_verdict": ("verdict", 420),
    "report_tokens": ("tokens", 620),
}
"""Names of pictures: the section of the page that each shows, and how much of it, pixels."""
WIDTH, MOST_BYTES = 1000, 150_000


def picture_of(browser: Browser, section: str, height: int) -> bytes:
    """A PNG of the top of a section, in 64 colours."""
    browser.run(f"document.getElementById('{section}').scrollIntoView()")
    browser.wait_for("document.documentElement.dataset.ready === 'yes'")
    box = browser.run(
        f"const box = document.getElementById('{section}').getBoundingClientRect();return [box.x + "
        "window.scrollX, box.y + window.scrollY, box.width, box.height]"
    )
    clip = {"x": 0, "y": box[1], "width": WIDTH, "height": min(height, box[3]), "scale": 1}
    screenshot = browser.command(
        "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
    )
    image = Image.open(io.BytesIO(base64.b64decode(screenshot["data"]))).convert("RGB").quantize(64)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def write_pictures(run: Path, output: Path) -> list[Path]:
    """Write all pictures of a run's page; raises ``ValueError`` when one is too large."""
    paths = []
    with tempfile.TemporaryDirectory() as place, open_browser() as browser:
        page = write_report(Request((run,), Path(place) / "report.html")).path
        browser.resize(WIDTH, 900)
        browser.open(page)
        for name, (section, height) in SECTIONS.items():
            picture = picture_of(browser, section, height)
            if len(picture) > MOST_BYTES:
                raise ValueError(f"{name}.png must have at most {MOST_BYTES} bytes, it has {len(picture)}.")
            paths.append(output / f"{name}.png")
            paths[-1].write_bytes(picture)
    return paths


def main() -> int:
    """Write the pictures and name them."""
    parser = argparse.ArgumentParser(prog="python scripts/page_pictures.py", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run with token records")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images", help="where the pictures go")
    options = parser.parse_args()
    if DRIVER is None or CHROMIUM is None:
        sys.stderr.write(f"{REASON}\n")
        return 1
    for path in write_pictures(options.run, options.output):
        print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
