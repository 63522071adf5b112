"""The nearest known key: by its last part when that exists elsewhere, else as a whole."""

from verl_rc.config.nearest import nearest_key

KNOWN = ["actor.optim.lr", "critic.optim.lr", "data.train_batch_size"]


def test_a_known_leaf_in_a_wrong_section() -> None:
    assert nearest_key("actor.lr", KNOWN) == "actor.optim.lr"
    assert nearest_key("critic.lr", KNOWN) == "critic.optim.lr"


def test_a_mistyped_leaf() -> None:
    assert nearest_key("data.train_bach_size", KNOWN) == "data.train_batch_size"
