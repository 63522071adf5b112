"""Refused keys: no entry hides a key of the schema, each says what to write, and renamed ones lead to keys
that exist."""

import re

import pytest

from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of
from verl_rc.config.verl.refused import REFUSALS, REFUSED_VALUES, RENAMED, refusal_of

KNOWN = set(fields_of(RunConfig))
SECTIONS = {key.rsplit(".", depth)[0] for key in KNOWN for depth in range(1, 5) if key.count(".") >= depth}


def test_no_key_of_the_schema_is_refused() -> None:
    assert not [key for key in KNOWN | SECTIONS if refusal_of(key)]


def test_the_longest_entry_holds() -> None:
    found = refusal_of("reward_model.overlong_buffer.len")
    assert found is not None
    assert found[0] == "reward_model.overlong_buffer"
    assert refusal_of("data.train_files") is None


@pytest.mark.parametrize("key", REFUSALS)
def test_every_reason_says_what_to_do(key: str) -> None:
    reason = REFUSALS[key].reason
    assert key in RENAMED or re.search(
        r"\b(write|drop|give|copy|put|edit|rename|merge|use|adapters are)\b", reason
    ), reason
    assert not reason.endswith(".")


def test_keys_named_in_reasons_exist() -> None:
    reasons = [refusal.reason for refusal in REFUSALS.values()] + list(REFUSED_VALUES.values())
    whole = r"\b(?:actor_rollout_ref|data|trainer|critic|reward|algorithm)\.[a-z_]+(?:\.[a-z_]+)*"
    named = {found for reason in reasons for found in re.findall(whole, reason)}
    assert len(named) > 20
    assert not {key for key in named if key not in KNOWN | SECTIONS}


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_renamed_keys_are_refused_and_lead_somewhere(old: str, new: str) -> None:
    assert refusal_of(old) is not None
    assert new in KNOWN | SECTIONS | {"reward.reward_manager.name"}


@pytest.mark.parametrize(("key", "value"), REFUSED_VALUES)
def test_refused_values_belong_to_keys(key: str, value: str) -> None:
    assert key in KNOWN
    assert value
