"""A study of docs/evidence.md: its runs, the question that they answer, and what was expected of them."""

from dataclasses import dataclass

from verl_rc.study import study
from verl_rc.study.machine import ASYNCHRONOUS, having
from verl_rc.study.runs import Run


@dataclass(frozen=True, kw_only=True)
class Study(study.Study):
    """Runs, and what the page says of them."""

    question: str
    expectation: str
    """What was expected, written before the first run."""
    found: str
    """What the runs say so far, without the numbers, which the table has."""
    figures: tuple[str, ...]
    """A figure for each of these words, with the arms that have it in their name."""
    quick: tuple[str, ...]
    """Arms of ``--quick``, which takes the first seed alone: those that show the sign of the effect."""
    would_change: str = ""
    """The results, or the conditions, that would change the conclusion."""

    @property
    def runs_at_a_time(self) -> int:
        """How many runs two cores run at a time: one where engine and trainer need a core each."""
        return 1 if having(self, self.arms, ASYNCHRONOUS) else 2


def quick(study: Study, known: dict[tuple[str, int], Run]) -> list[tuple[str, int]]:
    """Of the first seed, the arms that show the sign of the effect, as far as they are still to be run."""
    return [(arm, study.seeds[0]) for arm in study.quick if (arm, study.seeds[0]) not in known]
