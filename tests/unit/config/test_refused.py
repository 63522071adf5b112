"""Refused keys: each row can be reached, and no refused key is a key of the schema."""

from verl_rc.config.load import known_keys
from verl_rc.config.refused import REFUSED_SECTIONS, RENAMED
from verl_rc.config.run import RunConfig


def test_renamed_and_refused_keys_are_no_keys() -> None:
    known = set(known_keys(RunConfig))
    assert not known & set(RENAMED)
    assert not [key for key in known for section in REFUSED_SECTIONS if key.startswith(section + ".")]


def test_replacements_that_are_keys_exist() -> None:
    known = set(known_keys(RunConfig)) | {"critic.optim.clip_grad"}
    for instead in RENAMED.values():
        if not instead.startswith("nothing"):
            assert {part.split("=")[0] for part in instead.split() if "=" in part or "." in part} & known
