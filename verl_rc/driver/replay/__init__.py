"""``verl-rc diagnose``: controlled replays of recorded tokens. Beside export the only tool that loads models and engines."""

from verl_rc.driver.replay.diagnosis import REPLAYS, Diagnosis, DiagnosisRequest, diagnose
from verl_rc.driver.replay.rows import NothingToReplayError

__all__ = ["REPLAYS", "Diagnosis", "DiagnosisRequest", "NothingToReplayError", "diagnose"]
