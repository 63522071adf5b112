"""The order of groups: which may be admitted to the engines, which form the next batch, and which are too
old.

    may be admitted:  numbers < (published + M (1 + k)) B + replaced

A group is a prompt with its samples; its number is its place in the order of admission over the whole life of
a run. However engines work, a group that is trained in the order of admission is then at most ⌈M (1 + k)⌉ − 1
steps old. The next batch:

    order=admitted: the B lowest numbers that are to be trained on, once every lower number is decided
    order=ready:    the B decided groups of lowest version (then number), once all remaining groups can still
                    be trained on in time: for every version v
                    remaining groups with version <= v  <=  B (steps until those of v reach the hard bound)

The oldest remaining group alone does not decide: several may be as old, and only B of them fit into its last
step.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import Literal

_first = itemgetter(0)
_end = itemgetter(1)
PlainRanges = tuple[tuple[int, int], ...]
"""Ranges [first, end) of numbers as a checkpoint holds them."""


@dataclass(frozen=True)
class NumberRanges:
    """A set of numbers >= 0; ``from_numbers`` and ``from_plain`` make one."""

    ranges: PlainRanges = ()
    """Pairs of the first number of a range and the one behind its last, ascending; they neither overlap nor
    touch."""

    @classmethod
    def from_numbers(cls, numbers: Iterable[int]) -> "NumberRanges":
        """The set of ``numbers``, in any order; a number that comes twice counts once."""
        ranges: list[tuple[int, int]] = []
        for number in sorted(set(numbers)):
            if ranges and ranges[-1][1] == number:
                ranges[-1] = (ranges[-1][0], number + 1)
            else:
                ranges.append((number, number + 1))
        return cls(tuple(ranges))

    @classmethod
    def from_plain(cls, plain: Sequence[Sequence[int]]) -> "NumberRanges":
        """The set with these ``ranges``, read from a checkpoint. Raises ``ValueError`` for ranges that are
        empty, out of order or not merged."""
        ends = [int(end) for pair in plain for end in pair]
        is_ascending = all(start < end for start, end in pairwise([-1, *ends]))
        if any(len(pair) != 2 for pair in plain) or not is_ascending:
            raise ValueError(
                f"ranges must be ascending pairs [first, end) of numbers >= 0, apart, got {list(plain)[:5]}."
            )
        return cls(tuple(zip(ends[::2], ends[1::2], strict=True)))

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self.ranges, number, key=_end)
        return place < len(self.ranges) and self.ranges[place][0] <= number

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def __iter__(self) -> Iterator[int]:
        return (number for first, end in self.ranges for number in range(first, end))

    def union(self, other: "NumberRanges") -> "NumberRanges":
        """All numbers of both; cheap where ``other`` has few ranges."""
        ranges = list(self.ranges)
        for first, end in other.ranges:
            start, stop = bisect_left(ranges, first, key=_end), bisect_right(ranges, end, key=_first)
            touched = ranges[start:stop]
            ranges[start:stop] = [(min([first, *map(_first, touched)]), max([end, *map(_end, touched)]))]
        return NumberRanges(tuple(ranges))

    def missing_below(self, end: int) -> "NumberRanges":
        """The numbers 0, 1, …, ``end`` - 1 that are not in this set."""
        starts = [0, *map(_end, self.ranges)]
        stops = [*map(_first, self.ranges), end]
        gaps = ((start, min(stop, end)) for start, stop in zip(starts, stops, strict=True))
        return NumberRanges(tuple((start, stop) for start, stop in gaps if start < stop))


class AdmissionError(RuntimeError):
    """A group was admitted beyond the bound, or decided twice, or never admitted."""


@dataclass(frozen=True)
class AdmissionState:
    """The progress of a run for a checkpoint, in absolute numbers. The rule itself follows the
    configuration."""

    published: int
    admitted: int
    replaced: int
    decided: PlainRanges


@dataclass(frozen=True)
class Admission:
    """The rule of admission and the progress of the run. Immutable: every method returns the next value."""

    batch: int
    """B: groups that a step trains on."""
    places: int
    """M (1 + k) B (``AsyncTrainingConfig.groups_in_memory``): groups that may be in flight or wait at
    once."""
    total: int | None = None
    """Groups that the run trains on in all, after which none is admitted. None means no limit."""
    draw: int | None = None
    """A synchronous run with dynamic sampling admits this many groups at once, and as many again when all are
    decided and fewer than B are kept. None if groups are admitted one by one, as places get free."""
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
        if self.batch < 1 or self.places < 1 or min(counts) < 0:
            raise ValueError(
                "batch and places must be >= 1, published, admitted and replaced >= 0, got "
                f"{self.batch}, {self.places} and {counts}."
            )

    def allowance(self) -> int:
        """How many groups may be admitted now; 0 when a resumed run has more in flight than its rule would
        admit."""
        limit = self.published * self.batch + self.places
        if self.total is not None:
            limit = min(limit, self.total)
        free = max(0, limit + self.replaced - self.admitted)
        if self.draw is None or not free:
            return free
        return self.draw if len(self.decided) == self.admitted else 0

    def admit(self, count: int) -> "Admission":
        """Hand out the next ``count`` numbers, ``admitted`` first. Raises ``AdmissionError`` beyond the
        allowance."""
        if not 0 <= count <= self.allowance():
            raise AdmissionError(
                f"at most {self.allowance()} groups may be admitted at version {self.published} with "
                f"{self.admitted} admitted and {self.replaced} replaced, got {count}."
            )
        return replace(self, admitted=self.admitted + count)

    def publish(self, version: int) -> "Admission":
        """The engines hold ``version`` now. Raises ``AdmissionError`` when that is an older one."""
        if version < self.published:
            raise AdmissionError(f"versions only grow: {version} was published after {self.published}.")
        return replace(self, published=version)

    def keep(self, numbers: Iterable[int]) -> "Admission":
        """Decide that these groups, which are whole, are trained on. Raises ``AdmissionError`` unless each
        was undecided."""
        return self._decide(NumberRanges.from_numbers(numbers))

    def free(self, numbers: Iterable[int]) -> "Admission":
        """Decide that these groups are not trained on; each frees one place. Raises ``AdmissionError`` unless
        each was undecided."""
        freed = NumberRanges.from_numbers(numbers)
        return replace(self._decide(freed), replaced=self.replaced + len(freed))

    def drop(self, numbers: Iterable[int]) -> "Admission":
        """Decide that these groups, undecided or kept, are not trained on; each frees one place.

        Raises ``AdmissionError`` for a number that was not admitted. The running ledger refuses a number
        that is dropped twice.
        """
        dropped = NumberRanges.from_numbers(numbers)
        undecided = self._decide(
            NumberRanges.from_numbers(number for number in dropped if number not in self.decided)
        )
        return replace(undecided, replaced=self.replaced + len(dropped))

    def state(self) -> AdmissionState:
        """Return the progress for a checkpoint."""
        return AdmissionState(self.published, self.admitted, self.replaced, self.decided.ranges)

    def resumed(self, state: AdmissionState) -> "Admission":
        """This rule with the progress of ``state``, which may come from a run with other k and M.

        Raises ``ValueError`` when the state's numbers contradict each other.
        """
        decided = NumberRanges.from_plain(state.decided)
        admitted = state.admitted
        if len(decided) + len(decided.missing_below(admitted)) != admitted or state.replaced > len(decided):
            raise ValueError(
                f"decided numbers must be below the {admitted} admitted ones and replaced ones among them, "
                f"got {decided.ranges[-5:]} and {state.replaced} replaced."
            )
        return replace(
            self, published=state.published, admitted=admitted, replaced=state.replaced, decided=decided
        )

    def _decide(self, numbers: NumberRanges) -> "Admission":
        refused = [number for number in numbers if number >= self.admitted or number in self.decided]
        if refused:
            raise AdmissionError(
                f"a group is decided once, after its admission: {refused[:5]} are not below {self.admitted} "
                "or were decided before."
            )
        return replace(self, decided=self.decided.union(numbers))


@dataclass(frozen=True)
class OpenGroup:
    """A group that was admitted and is neither trained on nor replaced."""

    number: int
    """Place in the order of admission."""
    version: int
    """Oldest weights that sampled any of its tokens; until it is whole, those of its admission."""
    decided: bool
    """Whole, scored and to be trained on."""


@dataclass(frozen=True)
class ReplayRule:
    """The rule by which open groups form batches."""

    order: Literal["admitted", "ready"]
    batch: int
    """B: groups of a step."""
    oldest: int
    """The hard bound on the age of a group that is trained on, in steps. The order of admission keeps it by
    itself."""
    late: Literal["wait", "drop"] = "wait"
    """For groups that would grow older: the trainer waits for them, or they are dropped and replaced."""


@dataclass(frozen=True)
class NextBatch:
    """The decision about one step."""

    numbers: tuple[int, ...] = ()
    """B groups to train on now, in the order of their rows; empty: not yet."""
    awaited: tuple[int, ...] = ()
    """Groups that must be decided before a batch can be formed, ascending; empty: none in particular."""
    dropped: tuple[int, ...] = ()
    """Groups beyond the hard bound, decided or not, which must be replaced first."""


def next_batch(groups: Iterable[OpenGroup], step: int, rule: ReplayRule) -> NextBatch:
    """What ``step`` (1 is the first) trains on, with these ``groups`` open.

    A token of version v is (``step`` - 1) - v steps old when ``step`` trains on it.
    """
    in_order = sorted(groups, key=lambda group: group.number)
    if rule.order == "admitted":
        return _lowest_numbers(in_order, rule)
    trained = step - 1
    too_old = {
        group.number for group in in_order if rule.late == "drop" and trained - group.version > rule.oldest
    }
    young = [group for group in in_order if group.number not in too_old]
    decided = sorted(
        (group for group in young if group.decided), key=lambda group: (group.version, group.number)
    )
    batch, later = decided[: rule.batch], decided[rule.batch :]
    dropped = tuple(sorted(too_old))
    if len(batch) < rule.batch:
        return NextBatch(dropped=dropped)
    undecided = [group for group in young if not group.decided]
    newest = _newest_that_does_not_fit([*undecided, *later], trained, rule) if rule.late == "wait" else None
    awaited = tuple(group.number for group in undecided if newest is not None and group.version <= newest)
    # With none awaited the batch is formed even if not all fit: a resumed run may have had a larger bound.
    return (
        NextBatch(awaited=awaited)
        if awaited
        else NextBatch(tuple(group.number for group in batch), dropped=dropped)
    )


def _lowest_numbers(groups: list[OpenGroup], rule: ReplayRule) -> NextBatch:
    first = groups[: rule.batch]
    undecided = tuple(group.number for group in first if not group.decided)
    if len(first) == rule.batch and not undecided:
        return NextBatch(tuple(group.number for group in first))
    return NextBatch(awaited=undecided)


def _newest_that_does_not_fit(groups: Collection[OpenGroup], trained: int, rule: ReplayRule) -> int | None:
    """The newest version v for which more ``groups`` have a version <= v than can be trained on in time. None
    if all fit."""
    by_version = Counter(group.version for group in groups)
    total = 0
    newest = None
    for version in sorted(by_version):
        total += by_version[version]
        # This step trains on other groups; the last step for the version is version + oldest + 1.
        if total > rule.batch * max(0, version + rule.oldest - trained):
            newest = version
    return newest
