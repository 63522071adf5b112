"""docs/migration_from_verl.md says what the tables of translations and refusals say."""

import re

from documents.migration import CORRECTION_EXAMPLES, SAME_KEYS, render

from verl_rc.config.load import load_config
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of
from verl_rc.config.verl.keys import MOVED
from verl_rc.config.verl.migration import migrate
from verl_rc.config.verl.refused import REFUSALS, RENAMED


def test_every_key_of_the_tables_is_named():
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert set(REFUSALS) | set(RENAMED) | set(MOVED) <= named


def test_keys_that_mean_something_else_are_keys():
    known = set(fields_of(RunConfig))
    assert set(SAME_KEYS) <= known


def test_every_release_has_an_example_whose_translation_loads():
    needed = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]
    needed.append("actor_rollout_ref.actor.use_dynamic_bsz=True")
    eras = set()
    for settings in CORRECTION_EXAMPLES.values():
        migration = migrate(settings)
        eras |= set(re.findall(r"settings of era (\w+)", " ".join(migration.notes)))
        load_config(RunConfig, [*needed, *migration.overrides])
    assert {era[0] for era in eras} == {"A", "B", "C", "D"}


def test_other_defaults_are_shown_beside_those_of_verl():
    _, _, section = render().partition("## Same key, another default")
    assert "| `data.dataloader_num_workers` | `8` | `0` | the driver loads text fastest itself |" in section
    both = ", ".join(f"`{side}.strategy`" for side in ("actor_rollout_ref.actor", "critic"))
    assert f"| {both} | `fsdp` | `fsdp2` | both names mean FSDP2 |" in section
    assert "| `reward.num_workers` | `8` | `null` | one for each core, at most 8 |" in section
    assert "| `critic.checkpoint.async_save` | `False` | that of `actor_rollout_ref.actor." in section
    assert "`data.val_files` | `~/data/rlhf/gsm8k/test.parquet` | must be given |" in section


def test_rows_have_as_many_cells_as_their_heads():
    width = None
    for line in render().splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = len(re.split(r"(?<!\\)\|", line))
        width = width or cells
        assert cells == width, line
