"""Writes the generated pages of this checkout: python -m scripts.documents [--check]."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from documents.pages import stale_pages, write_pages

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what is stale, or with ``--check`` only name it; returns 1 when a page was stale in a check."""
    parser = argparse.ArgumentParser(prog="python -m scripts.documents", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a page is stale")
    check = parser.parse_args(arguments).check
    pages = stale_pages(ROOT) if check else write_pages(ROOT)
    for name in pages:
        sys.stdout.write(
            f"{name} is stale: run python -m scripts.documents\n" if check else f"{name} written\n"
        )
    return int(check and bool(pages))


if __name__ == "__main__":
    sys.exit(main())
