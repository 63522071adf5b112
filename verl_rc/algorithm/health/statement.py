"""Statements of a verdict with their numbers, so that the same words stand on the page, the console and in
JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Topic = Literal["learning", "gap", "correction", "speed"]
Level = Literal["fault", "notice", "good", "unknown"]
Confidence = Literal["named", "likely", "possible", ""]


@dataclass(frozen=True)
class Statement:
    """One sentence of the verdict, and what it rests on."""

    topic: Topic
    cause: str
    """A short name that stays: ``weights never arrive``."""
    level: Level
    sentence: str
    """A template that was filled with ``evidence``: no other numbers are in it but thresholds."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    confidence: Confidence = ""
    """named: a rule holds on two records or more; likely: on one, or near a bound; possible: only a
    correlation says so."""
    steps: tuple[int, int] | None = None
    next_test: str = ""
    """The test that decides, or what to do; empty when nothing is to be done."""
    overrides: tuple[str, ...] = ()
    """Overrides of the configuration, ready to paste."""
    row: int | None = None
    """Row of the decision table in docs/see_why.md; None outside it."""

    @property
    def step_range(self) -> str:
        """The steps that the statement is about, in words."""
        if self.steps is None:
            return ""
        first, last = self.steps
        return f"step {first}" if first == last else f"steps {first} to {last}"

    @property
    def text(self) -> str:
        """The whole statement in one line."""
        degree = f" ({self.confidence})" if self.confidence and self.level in ("fault", "notice") else ""
        steps = f" [{self.step_range}]" if self.step_range else ""
        return f"{self.sentence}{degree}{steps}"

    def as_json(self) -> dict[str, Any]:
        """Return the statement for machines; numbers that are not finite are None."""
        return {
            "topic": self.topic,
            "cause": self.cause,
            "level": self.level,
            "sentence": self.sentence,
            "confidence": self.confidence,
            "evidence": {
                name: value if math.isfinite(value) else None for name, value in self.evidence.items()
            },
            "steps": None if self.steps is None else list(self.steps),
            "next_test": self.next_test,
            "overrides": list(self.overrides),
            "row": self.row,
        }


def literal(text: str) -> str:
    """A text of the run, for instance the name of a metric, as part of a template."""
    return text.replace("{", "{{").replace("}", "}}")


def filled_statement(
    topic: Topic, cause: str, level: Level, template: str, evidence: Mapping[str, float], **fields: Any
) -> Statement:
    """A statement whose sentence is ``template`` filled with ``evidence``, and its other ``fields``."""
    return Statement(topic, cause, level, template.format(**evidence), dict(evidence), **fields)
