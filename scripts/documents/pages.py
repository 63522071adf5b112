"""Pages generated from the code: ``python -m scripts.documents`` writes them, ``--check`` compares them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from documents import configuration, migration, tables

PAGES: Mapping[str, Callable[[], str]] = {
    "docs/configuration.md": configuration.render,
    "configs/reference.yaml": configuration.render_reference,
    "docs/metrics.md": tables.metrics_page,
    "docs/migration_from_verl.md": migration.render,
}
"""What writes each page, by its path in a checkout."""


TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "docs/rollout_correction.md": {"presets": tables.presets_table},
    "docs/token_record.md": {"fields": tables.fields_table},
    "docs/see_why.md": {
        "signature causes": tables.signature_causes_table,
        "run causes": tables.run_causes_table,
    },
}
"""What writes each table of a page that is written by hand, by the page's path and the table's name."""

_TABLE = re.compile(
    r"(<!-- table of (.*?), by scripts.documents -->\n).*?(?=<!-- end of table -->)", re.DOTALL
)


def write_pages(root: Path) -> list[str]:
    """Write what is stale in the pages of the checkout ``root``; returns their names."""
    stale = stale_pages(root)
    for name in stale:
        (root / name).write_text(_current(root, name), encoding="utf-8")
    return stale


def stale_pages(root: Path) -> list[str]:
    """Pages of the checkout ``root`` that are missing or differ from what the code generates.

    Raises ``ValueError`` when ``root`` is no checkout.
    """
    missing = sorted({str(root / Path(name).parent) for name in PAGES if not (root / name).parent.is_dir()})
    missing += [str(root / name) for name in TABLES if not (root / name).is_file()]
    if missing:
        raise ValueError(
            f"generated pages belong to a checkout of the repository, which has {', '.join(missing)}"
        )
    return [name for name in (*PAGES, *TABLES) if _text_of(root / name) != _current(root, name)]


def _current(root: Path, name: str) -> str:
    if name in PAGES:
        return PAGES[name]()
    page = (root / name).read_text(encoding="utf-8")
    return _TABLE.sub(lambda table: f"{table[1]}{TABLES[name][table[2]]()}", page)


def _text_of(page: Path) -> str | None:
    return page.read_text(encoding="utf-8") if page.is_file() else None
