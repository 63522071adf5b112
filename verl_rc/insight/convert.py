"""``verl-rc convert`` writes the token files of any trainer as one file of token records."""

from itertools import chain
from pathlib import Path

from verl_rc.data.token_lines import TokenLines
from verl_rc.data.token_record import VERSION_FACT
from verl_rc.data.token_rows import rows_of
from verl_rc.insight.run_folder import NothingToReadError, token_source

_STEP_FACTS = ("step", "trainer", VERSION_FACT)
"""Facts that are not the file's: rows have the step and the version, the writer adds the trainer."""


def convert(path: Path, output: Path) -> list[str]:
    """Write the token records at ``path`` to ``output`` as JSON lines; returns lines for the console.

    Raises:
        NothingToReadError: there are none that can be read.
    """
    source = token_source(path)
    if source is None:
        raise NothingToReadError(f"{path} must hold token files of a trainer that is known; it holds none.")
    records = source.records()
    first = next(records, None)
    if first is None:
        raise NothingToReadError(f"{path} must hold token records that can be read. {' '.join(source.notes)}")
    facts = {name: value for name, value in first.facts.items() if name not in _STEP_FACTS}
    rows = 0
    with TokenLines(output, source.trainer, **facts) as lines:
        for record in chain([first], records):
            for row in rows_of(record):
                lines.write(**row)
                rows += 1
    return [f"read as {source.trainer}: {rows:,} rows", *source.notes, f"written: {output}"]
