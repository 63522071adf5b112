"""docs/rollout_correction.md says what the presets are."""

import re

from documents.tables import effective_overrides, presets_table

from verl_rc.config.rollout_correction import PRESETS


def test_every_preset_is_in_one_row():
    rows = [line.split(" | ")[0] for line in presets_table().splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(PRESETS)


def test_names_for_the_same_fields_share_a_row():
    (row,) = (line for line in presets_table().splitlines() if "`token_is`" in line)
    assert row.startswith("| `decoupled_token_is`, `token_is`, `token_tis`, `tis` | `rollout_is=token ")


def test_fields_are_those_that_decide_something():
    assert effective_overrides("disabled") == "none"
    assert effective_overrides("decoupled_k3_rs") == "`rollout_rs=seq_mean_k3 rollout_rs_threshold=0.01`"
    assert effective_overrides("icepop") == "`rollout_is=token rollout_is_threshold=0.5_5.0`"
    words = effective_overrides("bypass_pg_is").strip("`").split()
    assert set(words) == {
        "rollout_is=sequence",
        "rollout_is_threshold=2.0",
        "bypass_mode=True",
        "loss_type=reinforce",
    }
