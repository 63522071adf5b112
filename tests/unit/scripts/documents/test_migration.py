"""docs/migration_from_verl.md says what the tables of translations and refusals say."""

import json
import re

from documents.migration import RECIPES, SAME_KEYS, render

from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of
from verl_rc.config.verl.keys import MOVED
from verl_rc.config.verl.refused import RENAMED


def names_in(page: str) -> set[str]:
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_key_with_another_name_is_named():
    assert set(RENAMED) | set(MOVED) <= names_in(render())


def test_what_a_recipe_of_verl_is_refused_for_is_named():
    """By itself, or by the section that it lies in; the codapo estimator by its value."""
    named = names_in(render())
    refused = {key for path in RECIPES.glob("*.json") for key in json.loads(path.read_text())["refused"]}
    assert len(refused) > 20
    for key in refused:
        parts = key.split(".")
        assert {".".join(parts[:length]) for length in range(1, len(parts) + 1)} & named, key


def test_keys_that_mean_something_else_are_keys():
    known = set(fields_of(RunConfig))
    assert set(SAME_KEYS) <= known


def test_other_defaults_are_shown_beside_those_of_verl():
    _, _, section = render().partition("## Same key, another default")
    assert "| `data.dataloader_num_workers` | `8` | `0` | the driver loads text fastest itself |" in section
    both = ", ".join(
        f"`{side}.fsdp_config.use_no_sync_for_gradient_accumulation`"
        for side in ("actor_rollout_ref.actor", "critic")
    )
    assert f"| {both} | `False` | `null` | the estimate of memory decides |" in section
    assert "| `reward.num_workers` | `8` | `null` | one for each core, at most 8 |" in section
    assert "`data.val_files`" not in section


def test_rows_have_as_many_cells_as_their_heads():
    width = None
    for line in render().splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = len(re.split(r"(?<!\\)\|", line))
        width = width or cells
        assert cells == width, line
