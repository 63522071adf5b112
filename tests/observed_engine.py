"""A real engine that can be asked what it would tell vLLM where sleeping is possible."""

from typing import Any
from unittest.mock import Mock

from verl_rc.rollout.engine import RolloutEngine


class ObservedEngine(RolloutEngine):
    """A RolloutEngine whose calls to vLLM can be recorded instead of made."""

    def calls_around_an_update(self) -> list[Any]:
        """What a sleep, and the two wakings around an update, ask of a vLLM built with ``enable_sleep_mode``."""
        can_sleep, llm = self._can_sleep, self._llm
        self._can_sleep, self._llm = True, Mock()
        try:
            answers = [self.sleep(), self.wake_up(["weights"]), self.wake_up(["kv_cache"])]
            assert answers == [True, True, True]
            return [(name, arguments, options) for name, arguments, options in self._llm.mock_calls]
        finally:
            self._can_sleep, self._llm = can_sleep, llm
