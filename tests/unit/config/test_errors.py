"""Messages about configurations: long lists, and the nearest known key to a mistyped one."""

import random
from collections.abc import Callable

import pytest

from verl_rc.config.errors import listed, nearest_key
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of


def test_long_lists_are_counted() -> None:
    assert listed(["c", "a", "b"], most=3) == "a, b, c"
    assert listed(["c", "a", "b"], most=1) == "a and 2 more"


KNOWN = [
    "actor.optim.lr",
    "critic.optim.lr",
    "data.train_batch_size",
    "algorithm.rollout.preset",
    "algorithm.loss_type",
]
KEYS = [*fields_of(RunConfig), "algorithm.rollout_correction.preset"]

SLIPS: dict[str, Callable[[str, int], str]] = {
    "dropped": lambda text, at: text[:at] + text[at + 1 :],
    "doubled": lambda text, at: text[: at + 1] + text[at:],
    "swapped": lambda text, at: text[:at] + text[at + 1 : at + 2] + text[at] + text[at + 2 :],
}


def test_a_known_leaf_in_a_wrong_section() -> None:
    assert nearest_key("actor.lr", KNOWN) == "actor.optim.lr"
    assert nearest_key("critic.lr", KNOWN) == "critic.optim.lr"
    assert nearest_key("data.lr", KNOWN) == "actor.optim.lr or critic.optim.lr"


def test_a_mistyped_leaf_or_section() -> None:
    assert nearest_key("data.train_bach_size", KNOWN) == "data.train_batch_size"
    assert nearest_key("algorithm.rolout.preset", KNOWN) == "algorithm.rollout.preset"
    assert nearest_key("algorithm.rollout_corection.preset", KEYS) == "algorithm.rollout_correction.preset"


def test_missing_sections() -> None:
    assert nearest_key("rollout.preset", KNOWN) == "algorithm.rollout.preset"


def test_two_that_are_as_near_are_both_offered() -> None:
    assert nearest_key("rollout_s", ["rollout_is", "rollout_rs", "reward"]) == "rollout_is or rollout_rs"


@pytest.mark.parametrize(("first", "slip"), [*enumerate(SLIPS)])
def test_every_key_with_a_slip_in_any_part_offers_itself(first: int, slip: str) -> None:
    draw = random.Random(0)
    checked = 0
    for key in KEYS[first :: len(SLIPS)]:  # every key meets one kind of slip
        parts = key.split(".")
        for index, part in enumerate(parts):
            mistyped = SLIPS[slip](part, draw.randrange(max(len(part) - 1, 1)))
            given = ".".join([*parts[:index], mistyped, *parts[index + 1 :]])
            if given not in KEYS:
                checked += 1
                assert key in nearest_key(given, KEYS).split(" or "), given
    assert checked > 200
