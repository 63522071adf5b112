"""``main_sft``: what must be given."""

import pytest

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_config
from verl_rc.config.sft import SftConfig

GIVEN = ["model.path=m", "data.train_files=a", "data.val_files=b", "trainer.output_dir=o"]


def test_a_minimal_configuration() -> None:
    config = load_config(SftConfig, [*GIVEN, "optim.lr=1e-3"])
    assert (config.optim.lr, config.trainer.output_dir) == (1e-3, "o")


def test_what_must_be_given_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.output_dir must be given: write trainer\.output_dir=<value>"
    ):
        load_config(SftConfig, GIVEN[:3])
