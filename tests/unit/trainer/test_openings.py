"""Prompts that environments open with, and the filter of prompts that are too long."""

from collections.abc import Mapping
from typing import Any

import pytest
from conversing import merging_tokenizer

from verl_rc.config.task import DataConfig
from verl_rc.records.dataset import PromptRow
from verl_rc.records.episode import Opening
from verl_rc.records.tokenize import encode_opening
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.environment_host import Hosts
from verl_rc.trainer.evaluate import open_for_validation
from verl_rc.trainer.openings import Openings, OverlongOpeningError

SHORT = Opening([{"role": "user", "content": "a"}])
LONG = Opening([{"role": "user", "content": "a" * 40}])


class OfRows(Hosts):
    """The opening of each row of the data, by the name of its source."""

    async def open(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        del seed
        return {"short": SHORT, "long": LONG, "none": None}[row["data_source"]]


def row(index: int, opening: str) -> PromptRow:
    return PromptRow(index, [1], [], opening, None, {})


def openings(**options: Any) -> Openings:
    """With a limit at the short opening's length."""
    tokenizer = merging_tokenizer()
    limit = len(encode_opening(tokenizer, SHORT))
    data = DataConfig(train_files=[], val_files=[], max_prompt_length=limit, **options)
    return Openings(OfRows(), tokenizer, data)


ROWS = [row(0, "short"), row(1, "long"), row(2, "none")]


def test_the_filter_of_long_prompts_leaves_out_what_an_environment_opens_too_long() -> None:
    short, left_out, plain = openings(filter_overlong_prompts=True).open([(one, 0) for one in ROWS])
    assert isinstance(short, PromptRow)
    assert short.opening == SHORT
    assert plain == ROWS[2]
    assert isinstance(left_out, OverlongOpeningError)
    assert "the opening of an episode of row 1" in str(left_out)


def test_an_opening_that_is_too_long_ends_the_run_without_a_filter() -> None:
    with pytest.raises(ValueError, match=r"in the opening of an episode of row 1.*filter_overlong_prompts"):
        openings().open([(one, 0) for one in ROWS])


def test_an_opening_that_spells_what_no_text_may_spell_fails_alone() -> None:
    asked = openings(filter_overlong_prompts=True)
    asked._tokenizer.add_special_tokens({"additional_special_tokens": ["a"]})
    failed, _, plain = asked.open([(one, 0) for one in ROWS])
    assert isinstance(failed, EpisodeFailedError)
    assert "the opening of an episode of row 0: a tool or an environment must spell" in str(failed)
    assert plain == ROWS[2]
    asked._allow_special_tokens = True
    assert isinstance(asked.open([(ROWS[0], 0)])[0], PromptRow)


def test_validation_leaves_out_the_same_prompts_but_not_all() -> None:
    of_data = openings(filter_overlong_prompts=True)
    kept = open_for_validation(ROWS, of_data, seed=1)
    assert [one.row_index for one in kept] == [0, 2]
    with pytest.raises(ValueError, match="lets through at most"):
        open_for_validation(ROWS[1:2], of_data, seed=1)
