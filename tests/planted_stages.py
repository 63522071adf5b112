"""Stages of ``doctor --gpu`` with faults."""

import os
import time

from verl_rc.config.run import RunConfig
from verl_rc.preflight.bring_up.run import Report
from verl_rc.preflight.finding import Finding


class PlantedStages:
    def __init__(self, config: RunConfig) -> None:
        self._folder = config.trainer.default_local_dir

    def fine(self) -> Report:
        return Report({"seconds": 1.5}, [Finding("ok", "fine", str(self._folder))])

    def wrong(self) -> Report:
        return Report({}, [Finding("failed", "wrong", "3", "it must be 4", "count again")])

    def raising(self) -> Report:
        raise ValueError("the link is down")

    def hanging(self) -> Report:
        time.sleep(600)
        raise AssertionError

    def dying(self) -> Report:
        os._exit(9)
