"""The order of replay: which open groups form the next batch, and which are too old.

    order=admitted: the B lowest numbers that are to be trained on, once every lower number is decided
    order=ready:    the B accepted groups of lowest version (then number), once all remaining groups can still
                    be trained on in time: for every version v
                    remaining groups with version <= v  <=  B (steps until those of v reach the hard bound)

The oldest remaining group alone does not decide: several may be as old, and only B of them fit into its last
step.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from verl_rc.algorithm.supply.group_book import BookedGroup


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


def next_batch(groups: Iterable[BookedGroup], step: int, rule: ReplayRule) -> NextBatch:
    """The groups that ``step`` (1 is the first) trains on when these ``groups`` are open.

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
    accepted = sorted(
        (group for group in young if group.is_accepted), key=lambda group: (group.version, group.number)
    )
    batch, later = accepted[: rule.batch], accepted[rule.batch :]
    dropped = tuple(sorted(too_old))
    if len(batch) < rule.batch:
        return NextBatch(dropped=dropped)
    undecided = [group for group in young if not group.is_accepted]
    newest = _newest_that_does_not_fit([*undecided, *later], trained, rule) if rule.late == "wait" else None
    awaited = tuple(group.number for group in undecided if newest is not None and group.version <= newest)
    # With none awaited the batch is formed even if not all fit: a resumed run may have had a larger bound.
    return (
        NextBatch(awaited=awaited)
        if awaited
        else NextBatch(tuple(group.number for group in batch), dropped=dropped)
    )


def _lowest_numbers(groups: Sequence[BookedGroup], rule: ReplayRule) -> NextBatch:
    first = groups[: rule.batch]
    undecided = tuple(group.number for group in first if not group.is_accepted)
    if len(first) == rule.batch and not undecided:
        return NextBatch(tuple(group.number for group in first))
    return NextBatch(awaited=undecided)


def _newest_that_does_not_fit(groups: Collection[BookedGroup], trained: int, rule: ReplayRule) -> int | None:
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
