"""Which groups make the next batch, which must be waited for, and which have grown too old.

    order=admitted: the B lowest numbers that are to be trained on, once every lower number is decided
    order=ready:    the B decided groups of lowest version (then number), once the older groups left behind all still fit:
                    for every version v:  groups left with version <= v  <=  B (steps until those of v reach the hard bound)

To look at the oldest group left behind alone is not enough: several may be as old, and only B of them fit into its last step.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal


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
    """How batches are made of open groups."""

    order: Literal["admitted", "ready"]
    batch: int
    """B: groups of a step."""
    oldest: int
    """The hard bound: steps that a group may be old when it is trained on. Groups trained in the order of admission keep it by
    themselves."""
    late: Literal["wait", "drop"] = "wait"
    """What becomes of groups that would grow older: the trainer waits for them, or they are dropped and replaced."""


@dataclass(frozen=True)
class NextBatch:
    """The decision about one step."""

    numbers: tuple[int, ...] = ()
    """B groups to train on now, in the order of their rows; empty: not yet."""
    awaited: tuple[int, ...] = ()
    """Groups that must be decided before any batch can be made, in ascending order; empty when any will do."""
    dropped: tuple[int, ...] = ()
    """Groups that are too old for ever, decided or not: they are to be replaced, before anything else."""


def next_batch(groups: Iterable[OpenGroup], step: int, rule: ReplayRule) -> NextBatch:
    """What ``step`` (1 is the first) trains on, with these ``groups`` open.

    A token of version v is (``step`` - 1) - v steps old when ``step`` trains on it.
    """
    given = sorted(groups, key=lambda group: group.number)
    if rule.order == "admitted":
        return _lowest_numbers(given, rule)
    trained = step - 1
    too_old = {group.number for group in given if rule.late == "drop" and trained - group.version > rule.oldest}
    left = [group for group in given if group.number not in too_old]
    decided = sorted((group for group in left if group.decided), key=lambda group: (group.version, group.number))
    batch, later = decided[: rule.batch], decided[rule.batch :]
    dropped = tuple(sorted(too_old))
    if len(batch) < rule.batch:
        return NextBatch(dropped=dropped)
    undecided = [group for group in left if not group.decided]
    newest = _newest_that_does_not_fit([*undecided, *later], trained, rule) if rule.late == "wait" else None
    awaited = tuple(group.number for group in undecided if newest is not None and group.version <= newest)
    # No group is awaited, but not all fit: a resumed run had a larger bound. The oldest go first.
    return NextBatch(awaited=awaited) if awaited else NextBatch(tuple(group.number for group in batch), dropped=dropped)


def _lowest_numbers(groups: list[OpenGroup], rule: ReplayRule) -> NextBatch:
    first = groups[: rule.batch]
    undecided = tuple(group.number for group in first if not group.decided)
    if len(first) == rule.batch and not undecided:
        return NextBatch(tuple(group.number for group in first))
    return NextBatch(awaited=undecided)


def _newest_that_does_not_fit(left: Collection[OpenGroup], trained: int, rule: ReplayRule) -> int | None:
    """The newest version up to which there are more groups ``left`` than can be trained on in time; None: all fit."""
    by_version, total, newest = Counter(group.version for group in left), 0, None
    for version in sorted(by_version):
        total += by_version[version]
        # This step trains others; the last that may train on this version is step version + oldest + 1.
        if total > rule.batch * max(0, version + rule.oldest - trained):
            newest = version
    return newest
