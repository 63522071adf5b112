"""The page that a run leaves behind when it ends or fails. Another process writes it, so that it can fail no run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from verl_rc.config.errors import ConfigError
from verl_rc.config.run import RunConfig
from verl_rc.driver.announce import say
from verl_rc.report.run_folder import ENDING

_SECONDS = 60.0
"""Time that the page may take; a scheduler that ends a run waits about so long."""
_REASONS = {0: "all done", 130: "Ctrl-C", 143: "SIGTERM"}


@contextmanager
def report_at_end(config: RunConfig) -> Iterator[None]:
    """Note how the run ended, and write ``report.html`` into its folder. To be entered first, so that all files are closed."""
    folder = Path(str(config.trainer.default_local_dir))
    with suppress(OSError):
        (folder / ENDING).unlink(missing_ok=True)  # of an earlier life
    status, reason = 1, ""
    try:
        yield
        status, reason = 0, _REASONS[0]
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        reason = _REASONS.get(status, "the process ended itself")
        raise
    except KeyboardInterrupt:
        status, reason = 130, _REASONS[130]
        raise
    except BaseException as error:
        status = 2 if isinstance(error, ConfigError) else 1
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise
    finally:
        if config.trainer.report == "at_end" and folder.is_dir():
            _write(folder, status, reason)


def _write(folder: Path, status: int, reason: str) -> None:
    """One line that says where the page is and what it says first, or why there is none."""
    command = [sys.executable, "-m", "verl_rc.cli", "report", str(folder)]
    try:
        (folder / ENDING).write_text(json.dumps({"status": status, "reason": reason}) + "\n", encoding="utf-8")
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        say("report: not written within %.0f s; verl-rc report %s writes it", _SECONDS, folder)
    except OSError as error:
        say("report: not written (%s)", error)
    except KeyboardInterrupt:
        say("report: not written; verl-rc report %s writes it", folder)
    else:
        lines = (done.stdout if done.returncode == 0 else done.stderr).splitlines()
        if done.returncode == 0:
            for line in lines:
                say("%s", line)
        else:
            say("report: not written (%s)", lines[-1] if lines else f"exit code {done.returncode}")
