"""Dynamic sampling: which prompts of a batch tell something."""

from collections.abc import Sequence


def informative_groups(values: Sequence[float], group_ids: Sequence[int]) -> list[int]:
    """Groups whose samples do not all have the same value, in order of appearance (DAPO, arXiv:2503.14476).

    ``values`` and ``group_ids`` hold one entry per sample. Advantages that compare samples of one prompt are 0 in all other
    groups. A sample alone in its group counts as informative: there is nothing it could equal.
    """
    by_group: dict[int, list[float]] = {}
    for group, value in zip(group_ids, values, strict=True):
        by_group.setdefault(group, []).append(value)
    return [group for group, of_group in by_group.items() if len(of_group) == 1 or min(of_group) < max(of_group)]
