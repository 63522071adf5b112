"""What is wrong with values, in sentences; what only follows from another finding is left out."""

import pytest
from pydantic import ValidationError

from verl_rc.config.errors import ConfigError
from verl_rc.config.load.given import in_sentences, refuse_huge
from verl_rc.config.run import RunConfig

ACTOR = {"use_dynamic_bsz": True}
GIVEN = {"data": {"train_files": "a", "val_files": "b"}, "actor_rollout_ref": {"model": {"path": "m"}, "actor": ACTOR}}


def sentences(**sections: object) -> list[str]:
    given = {**GIVEN, **sections}
    with pytest.raises(ValidationError) as raised:
        RunConfig.model_validate(given)
    return in_sentences(RunConfig, raised.value, given).splitlines()


def test_each_finding_is_a_sentence() -> None:
    assert sentences(trainer={"nnodes": 0, "seed": "x"}) == [
        "trainer.nnodes must be greater than or equal to 1; got 0: write that, or drop it for 1.",
        "trainer.seed must be a valid integer; got 'x': write that, or drop it for 1.",
    ]


def test_a_value_that_another_key_got_wrong_is_named_once() -> None:
    (sentence,) = sentences(data={**GIVEN["data"], "max_response_length": "long"})  # type: ignore[dict-item]
    assert sentence.startswith("data.max_response_length must be a valid integer")


def test_a_section_and_a_missing_key() -> None:
    assert sentences(trainer=3) == ["trainer must be a section; got 3: write its keys one by one, trainer.<name>=<value>."]
    assert sentences(data={}) == ["data.train_files must be given: write data.train_files=<value>.",
                                  "data.val_files must be given: write data.val_files=<value>."]  # fmt: skip


def test_numbers_have_at_most_64_bits() -> None:
    refuse_huge({"a": {"b": 2**62, "c": "x", "d": [2**99]}})
    with pytest.raises(ConfigError, match=r"a\.b must be a number of at most 63 bits, got 64; lower it"):
        refuse_huge({"a": {"b": 2**63}})
