"""Pages generated from the code: ``verl-rc docs`` writes them, ``verl-rc docs --check`` compares them."""

from collections.abc import Callable, Mapping
from pathlib import Path

from verl_rc.report.documents import configuration, metrics, migration, presets

PAGES: Mapping[str, Callable[[], str]] = {
    "docs/configuration.md": configuration.render,
    "configs/reference.yaml": configuration.render_reference,
    "docs/metrics.md": metrics.render,
    "docs/migration_from_verl.md": migration.render,
    "docs/presets.md": presets.render,
}
"""What writes each page, by its path in a checkout."""


def write_pages(root: Path) -> list[str]:
    """Write the pages of the checkout ``root`` that are stale; returns their names."""
    stale = stale_pages(root)
    for name in stale:
        (root / name).write_text(PAGES[name](), encoding="utf-8")
    return stale


def stale_pages(root: Path) -> list[str]:
    """Pages of the checkout ``root`` that are missing or differ from what the code generates.

    Raises ``ValueError`` when ``root`` is no checkout.
    """
    missing = sorted({str(root / Path(name).parent) for name in PAGES if not (root / name).parent.is_dir()})
    if missing:
        raise ValueError(f"generated pages belong to a checkout of the repository, which has {', '.join(missing)}")
    return [name for name, render in PAGES.items() if _text_of(root / name) != render()]


def _text_of(page: Path) -> str | None:
    return page.read_text(encoding="utf-8") if page.is_file() else None
