"""Calling a tool without waiting for ever, and without a traceback that does not say which tool it was."""

import queue
import reprlib
import threading
from collections.abc import Mapping
from typing import Any

from verl_rc.rewards.tools.tool import Tool

_KEY = "actor_rollout_ref.rollout.multi_turn"


class ToolFailedError(RuntimeError):
    """A tool did not do what it must; the message names it and the call."""


class ToolCaller:
    """Calls tools one after the other in a thread of its own, which does not keep the process alive when one of them hangs."""

    def __init__(self, timeout_seconds: float) -> None:
        """``timeout_seconds``: of each call."""
        self._timeout_seconds = timeout_seconds
        self._calls: queue.SimpleQueue[tuple[Tool, Mapping[str, Any]]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        """The tool's answer, as text for the policy.

        Raises ``ToolFailedError`` when the tool raises anything but ``ToolError``, gives no text, or is late; after that it must
        not be used again.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tools", daemon=True)
            self._thread.start()
        self._calls.put((tool, arguments))
        where = f"the tool {tool.name!r} of {_KEY}.tools, called with {reprlib.repr(dict(arguments))},"
        try:
            answer = self._answers.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise ToolFailedError(
                f"{where} must answer within {_KEY}.tool_timeout_seconds={self._timeout_seconds:g}, and is still at work. Give "
                "it a limit of its own that ends in a ToolError, or raise this one."
            ) from None
        if isinstance(answer, BaseException):
            raise ToolFailedError(
                f"{where} raised {answer!r}. A tool must raise verl_rc.rewards.tools.ToolError for a call that it cannot answer; "
                "its text is then the answer."
            ) from answer
        if not isinstance(answer, str):
            raise ToolFailedError(f"{where} must return a text, got {reprlib.repr(answer)}.")
        return answer

    def _work(self) -> None:
        while True:
            tool, arguments = self._calls.get()
            try:
                self._answers.put(tool.call(arguments))
            except BaseException as error:
                self._answers.put(error)
                raise  # ends this thread, which shows where it came from
