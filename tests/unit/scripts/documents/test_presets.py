"""docs/presets.md says what the presets are."""

from documents.tables import effective_overrides, presets_page

from verl_rc.config.rollout_correction import PRESETS


def test_every_preset_has_one_row():
    rows = [line for line in presets_page().splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(PRESETS)


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
