"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a line for each row, whose cells may hold ``|``."""
    lines = ["|" + "---|" * len(head), *(_line(row) for row in rows)]
    return "".join(f"{line}\n" for line in (_line(head), *lines))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
