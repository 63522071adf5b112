"""What each preset would have done with the tokens that a run recorded, with intervals; and which one it
would take."""

from verl_rc.insight.what_if.batch import NoRecordsError, RecordedBatch, clip_of, read_batch
from verl_rc.insight.what_if.estimate import Estimate, Interval, Updates, bias_updates, estimate_presets
from verl_rc.insight.what_if.trial import PresetTrial, tried_configs, try_presets, with_turns

__all__ = [
    "Estimate",
    "Interval",
    "NoRecordsError",
    "PresetTrial",
    "RecordedBatch",
    "Updates",
    "bias_updates",
    "clip_of",
    "estimate_presets",
    "read_batch",
    "tried_configs",
    "try_presets",
    "with_turns",
]
