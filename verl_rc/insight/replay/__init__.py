"""``verl-rc diagnose`` and ``what-if --gradients``: recorded tokens through models again.

Beside export the only tools that load models and engines.
"""

from verl_rc.insight.replay.diagnosis import diagnose_with_replays
from verl_rc.insight.replay.gradients import ParameterGradients
from verl_rc.insight.replay.rows import NothingToReplayError

__all__ = [
    "NothingToReplayError",
    "ParameterGradients",
    "diagnose_with_replays",
]
