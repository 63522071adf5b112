"""configs/reference.yaml: current, complete, and of no effect when it is given."""

import pytest
import yaml
from documents.configuration import render_reference

from verl_rc.config.load import load_run_config
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of

GIVEN = [
    "data.train_files=a",
    "data.val_files=b",
    "actor_rollout_ref.model.path=m",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
]


def test_it_names_every_key_and_its_meaning() -> None:
    lines = render_reference().splitlines()
    path: list[str] = []
    found = []
    for number, line in enumerate(lines):
        key, colon, _ = line.lstrip().removeprefix("# ").partition(":")
        indent = (len(line) - len(line.lstrip())) // 2
        name = ".".join([*path[:indent], key])
        if (
            colon
            and " " not in key
            and any(known == name or known.startswith(f"{name}.") for known in fields_of(RunConfig))
        ):
            path[indent:] = [key]
            found.append(name)
            assert lines[number - 1].lstrip().startswith("# "), f"{name} has no meaning above it"
    assert set(fields_of(RunConfig)) <= set(found)


def test_given_as_a_run_file_it_changes_nothing() -> None:
    for preset in ([], ["correction=decoupled_token_icepop"]):
        assert load_run_config(["--config-name=reference", *GIVEN, *preset]) == load_run_config(
            [*GIVEN, *preset]
        )


def test_what_must_be_given_is_still_missing() -> None:
    assert "train_files: ???" in render_reference()
    with pytest.raises(ValueError, match=r"data\.train_files must be given"):
        load_run_config(["--config-name=reference"])


def test_values_are_the_schemas_defaults() -> None:
    tree = yaml.safe_load(render_reference())
    assert tree["actor_rollout_ref"]["actor"]["clip_ratio_c"] == 3.0
    assert tree["trainer"]["logger"] == ["console", "wandb"]
    centering = {"enabled": False, "top_k": 32, "tail": "proportional"}
    assert tree["algorithm"]["rollout_correction"] == {"preset": None, "score_centering": centering}
