"""Configuration mistakes are ValueErrors, so that libraries may catch them as such."""

from verl_rc.config.errors import ConfigError


def test_a_configuration_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)
