"""``verl-rc diagnose`` and ``what-if --gradients``: recorded tokens through models again.

Beside export the only tools that load models and engines.
"""

from verl_rc.driver.replay.diagnosis import REPLAYS, Diagnosis, DiagnosisRequest, diagnose
from verl_rc.driver.replay.gradients import ParameterGradients
from verl_rc.driver.replay.rows import NothingToReplayError

__all__ = [
    "REPLAYS",
    "Diagnosis",
    "DiagnosisRequest",
    "NothingToReplayError",
    "ParameterGradients",
    "diagnose",
]
