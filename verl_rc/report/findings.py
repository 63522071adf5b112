"""What a check found: something that holds, something that must and does not, or something to know."""

from dataclasses import dataclass
from typing import Literal

_MARKS = {"ok": "ok  ", "failed": "FAIL", "note": "note"}


@dataclass(frozen=True)
class Finding:
    """One line of a report, with more lines where something is to be done."""

    status: Literal["ok", "failed", "note"]
    subject: str
    found: str
    must: str = ""
    """What must hold; given with ``failed``."""
    remedy: str = ""
    """What to do about it."""

    @classmethod
    def of(cls, holds: bool, subject: str, found: str, must: str, remedy: str) -> "Finding":
        """``ok`` where it holds, else ``failed``."""
        return cls("ok", subject, found) if holds else cls("failed", subject, found, must, remedy)

    def lines(self) -> list[str]:
        """For people."""
        more = [("must", self.must), ("do", self.remedy)]
        first = f"{_MARKS[self.status]}  {self.subject}: {self.found}"
        return [first, *(f"        {label:<5} {text}" for label, text in more if text)]


def verdict(failures: int) -> str:
    """The last line of a report."""
    return "The run can start." if failures == 0 else f"{failures} thing(s) stand in the way of the run."
