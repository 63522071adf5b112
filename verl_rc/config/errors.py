"""The error of every configuration mistake."""


class ConfigError(ValueError):
    """A configuration cannot be run; the message says what must hold, what was given and what to do."""
