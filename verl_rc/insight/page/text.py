"""Pieces of HTML. Everything that comes from a run goes through ``escaped``."""

import html
import math
from collections.abc import Iterable, Sequence

from verl_rc.printable import printable

LONGEST_TEXT = 2_000
"""Characters of a cell of a sample; a longer text is cut, and says so."""


def escaped(value: object) -> str:
    """Text for the page: nothing in it is markup, and its control codes are printable."""
    text = str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return html.escape(printable(text), quote=True)


def shortened(value: object, longest: int = LONGEST_TEXT) -> str:
    """Escaped text of at most ``longest`` characters."""
    text = str(value)
    if len(text) <= longest:
        return escaped(text)
    return f"{escaped(text[:longest])}… ({len(text) - longest:,} more characters)"


def number(value: float) -> str:
    """A number as a table shows it."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], css_class: str = "") -> str:
    """A table; the cells are HTML already."""
    header = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    kind = f' class="{css_class}"' if css_class else ""
    return f'<div class="scroll" tabindex="0"><table{kind}><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'  # noqa: E501


def section(name: str, title: str, content: str) -> str:
    """A panel of the page."""
    return f'<section id="{name}"><h2>{escaped(title)}</h2>{content}</section>'


def listed(sentences: Iterable[str]) -> str:
    """A list of escaped sentences."""
    return "<ul>" + "".join(f"<li>{escaped(sentence)}</li>" for sentence in sentences) + "</ul>"
