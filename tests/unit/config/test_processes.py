"""The encoding of text is UTF-8, or a command says so before it reads any."""

import os
import subprocess
import sys

import pytest

ASCII = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.parametrize(
    "command", [["verl_rc.cli", "explain", "task=digits"], ["verl_rc.main_ppo", "trainer.experiment_name=é"]]
)
def test_another_encoding_is_refused_in_one_sentence(command: list[str]) -> None:
    arguments = [sys.executable, "-m", *command]
    ended = subprocess.run(arguments, env={**os.environ, **ASCII}, capture_output=True, timeout=120)
    assert ended.returncode == 2
    error = ended.stderr.decode("ascii")
    assert "must be read and written as UTF-8, but the locale says ANSI_X3.4-1968" in error
    assert "Traceback" not in error
