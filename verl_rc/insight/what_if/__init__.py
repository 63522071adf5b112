"""What each preset would have done with the tokens that a run recorded, with intervals; and which one it
would take."""

from verl_rc.insight.what_if.answer import Answer, answer, tried_configs, with_turns
from verl_rc.insight.what_if.batch import NoRecordsError, RecordedBatch, clip_of, read_batch
from verl_rc.insight.what_if.estimate import Estimate, Interval, Updates, bias_updates, estimate_presets

__all__ = [
    "Answer",
    "Estimate",
    "Interval",
    "NoRecordsError",
    "RecordedBatch",
    "Updates",
    "answer",
    "bias_updates",
    "clip_of",
    "estimate_presets",
    "read_batch",
    "tried_configs",
    "with_turns",
]
