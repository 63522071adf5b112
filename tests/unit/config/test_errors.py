"""Configuration mistakes are ValueErrors, so that libraries may catch them as such."""

from verl_rc.config.errors import ConfigError, listed


def test_a_configuration_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


def test_long_lists_are_counted() -> None:
    assert listed(["c", "a", "b"], most=3) == "a, b, c"
    assert listed(["c", "a", "b"], most=1) == "a and 2 more"
