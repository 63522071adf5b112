"""WHAT a run is: a frozen, typed, documented schema; presets; checks; loading. Imports no torch."""

from verl_rc.config.errors import ConfigError
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.run import RunConfig

__all__ = ["ConfigError", "RolloutCorrectionConfig", "RunConfig"]
