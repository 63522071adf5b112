"""The finding of a check, in words for people."""

from dataclasses import dataclass
from typing import Literal

_MARKS = {"ok": "ok  ", "failed": "FAIL", "note": "note"}


@dataclass(frozen=True)
class Finding:
    """The result of one check: one line, with further lines for what must hold and what to do."""

    status: Literal["ok", "failed", "note"]
    subject: str
    found: str
    must: str = ""
    """The condition that must hold; empty unless the check failed."""
    remedy: str = ""
    """The remedy; empty unless the check failed."""

    @classmethod
    def from_condition(cls, holds: bool, subject: str, found: str, must: str, remedy: str) -> "Finding":
        """A finding with status ``ok`` when the condition ``holds``, else ``failed``."""
        return cls("ok", subject, found) if holds else cls("failed", subject, found, must, remedy)

    def lines(self) -> list[str]:
        """The finding as lines of text."""
        details = [("must", self.must), ("do", self.remedy)]
        summary = f"{_MARKS[self.status]}  {self.subject}: {self.found}"
        return [summary, *(f"        {label:<5} {text}" for label, text in details if text)]


def verdict(failures: int) -> str:
    """The last line of a report."""
    return "The run can start." if failures == 0 else f"{failures} thing(s) stand in the way of the run."
