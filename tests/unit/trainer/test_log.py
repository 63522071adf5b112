"""The driver's lines on standard output."""

import logging

import pytest

from verl_rc.trainer import log as module


def test_texts_of_models_move_no_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LOGGER", logging.getLogger("verl_rc_of_a_test"))
    module.log_to_stdout()
    try:
        raise ValueError("\x1b[31m")
    except ValueError:
        module._LOGGER.info("of %s:\n%s", "a\x1b]0;t\x07", "b", exc_info=True)
    output = capsys.readouterr().out
    assert output.startswith("of a\\x1b]0;t\\x07:\nb\n")
    assert "\x1b" not in output
