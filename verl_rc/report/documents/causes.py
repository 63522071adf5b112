"""The table of causes in docs/see_why.md, from the rules that judge the signatures of a step."""

from verl_rc.report.verdict.cause import CAUSES


def render() -> str:
    """One row for each cause, in the order in which they are asked."""
    rows = ((str(cause.row), cause.condition, cause.name, cause.next_test) for cause in CAUSES)
    cells = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return "| row | if | cause | do |\n|---|---|---|---|\n" + "".join(f"| {row} |\n" for row in cells)
