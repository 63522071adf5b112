"""How far generation may run ahead of training: which groups may be handed to the engines, and which are decided.

    may be admitted:  numbers < (published + M (1 + k)) B + replaced

A group is a prompt with its samples; its number is its place in the order of admission over the whole life of a run. However
engines work, a group that is trained in the order of admission is then at most ⌈M (1 + k)⌉ − 1 steps old.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction

from verl_rc.ppo.number_ranges import NumberRanges, PlainRanges


class AdmissionError(RuntimeError):
    """A group was admitted beyond the bound, or decided twice, or never admitted."""


@dataclass(frozen=True)
class AdmissionState:
    """The progress of a run for a checkpoint, in absolute numbers. The rule itself follows the configuration."""

    published: int
    admitted: int
    replaced: int
    decided: PlainRanges


@dataclass(frozen=True)
class Admission:
    """The rule, and where the run is. A value: every move returns the next one."""

    batch: int
    """B: groups that a step trains on."""
    every: int = 1
    """M: steps from one publication of weights to the next."""
    bound: Fraction = Fraction(0)
    """k: publications that generation may be ahead; 0 with ``every=1`` is the synchronous run."""
    total: int | None = None
    """Groups that the whole run trains on, after which none is admitted; None: no end is known."""
    published: int = 0
    """Version that the engines hold: training steps done when it was published."""
    admitted: int = 0
    """Numbers 0, 1, …, ``admitted`` - 1 were handed out."""
    replaced: int = 0
    """Groups that will not be trained on (filtered, failed or dropped); each frees one place."""
    decided: NumberRanges = field(default_factory=NumberRanges)
    """Numbers that are trained on or will be, and those that were replaced."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a rule that admits nothing."""
        counts = (self.published, self.admitted, self.replaced)
        if self.batch < 1 or self.every < 1 or self.bound < 0 or min(counts) < 0:
            raise ValueError(
                "batch and every must be >= 1, bound, published, admitted and replaced >= 0, got "
                f"{self.batch}, {self.every}, {self.bound} and {counts}."
            )

    @property
    def places(self) -> int:
        """M (1 + k) B: the groups that may be in flight or wait at once, as far as training has come with the weights."""
        return math.ceil(self.every * (1 + self.bound) * self.batch)

    def allowance(self) -> int:
        """How many groups may be admitted now; 0 when a resumed run has more in flight than its rule would admit."""
        limit = self.published * self.batch + self.places
        if self.total is not None:
            limit = min(limit, self.total)
        return max(0, limit + self.replaced - self.admitted)

    def undecided(self) -> NumberRanges:
        """Admitted numbers that are still being sampled or scored: a resumed run hands these to the engines first."""
        return self.decided.missing_below(self.admitted)

    def admit(self, count: int) -> "Admission":
        """Hand out the next ``count`` numbers, ``admitted`` first. Raises ``AdmissionError`` beyond the allowance."""
        if not 0 <= count <= self.allowance():
            raise AdmissionError(
                f"at most {self.allowance()} groups may be admitted at version {self.published} with {self.admitted} admitted "
                f"and {self.replaced} replaced, got {count}."
            )
        return replace(self, admitted=self.admitted + count)

    def publish(self, version: int) -> "Admission":
        """The engines hold ``version`` now. Raises ``AdmissionError`` when that is an older one."""
        if version < self.published:
            raise AdmissionError(f"versions only grow: {version} was published after {self.published}.")
        return replace(self, published=version)

    def keep(self, numbers: Iterable[int]) -> "Admission":
        """These are whole and will be trained on. Raises ``AdmissionError`` unless each was undecided."""
        return self._decide(NumberRanges.from_numbers(numbers))

    def free(self, numbers: Iterable[int]) -> "Admission":
        """These will never be trained on; each frees one place. Raises ``AdmissionError`` unless each was undecided."""
        given = NumberRanges.from_numbers(numbers)
        return replace(self._decide(given), replaced=self.replaced + len(given))

    def drop(self, numbers: Iterable[int]) -> "Admission":
        """These were undecided or kept, and are too old now; each frees one place.

        Raises ``AdmissionError`` for a number that was not admitted. That nothing is dropped twice is seen by the running ledger.
        """
        given = NumberRanges.from_numbers(numbers)
        undecided = self._decide(NumberRanges.from_numbers(number for number in given if number not in self.decided))
        return replace(undecided, replaced=self.replaced + len(given))

    def state(self) -> AdmissionState:
        """Return the progress for a checkpoint."""
        return AdmissionState(self.published, self.admitted, self.replaced, self.decided.plain())

    def resumed(self, state: AdmissionState) -> "Admission":
        """This rule at the place where ``state`` was taken; k and M may have been others there.

        Raises ``ValueError`` when the state's numbers contradict each other.
        """
        decided, admitted = NumberRanges.from_plain(state.decided), state.admitted
        if len(decided) + len(decided.missing_below(admitted)) != admitted or state.replaced > len(decided):
            raise ValueError(
                f"decided numbers must be below the {admitted} admitted ones and replaced ones among them, got "
                f"{decided.plain()[-5:]} and {state.replaced} replaced."
            )
        return replace(self, published=state.published, admitted=admitted, replaced=state.replaced, decided=decided)

    def _decide(self, given: NumberRanges) -> "Admission":
        wrong = [number for number in given if number >= self.admitted or number in self.decided]
        if wrong:
            raise AdmissionError(
                f"a group is decided once, after its admission: {wrong[:5]} are not below {self.admitted} or were decided before."
            )
        return replace(self, decided=self.decided.union(given))
