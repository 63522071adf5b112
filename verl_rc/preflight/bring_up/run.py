"""Run the stages, each in a separate process, and write their measurements."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_rc.config.run import RunConfig
from verl_rc.distributed.child_process import ChildProcess, HangError, RemoteError
from verl_rc.preflight.finding import Finding

STAGES: Mapping[str, float] = {
    "machine": 120.0,
    "ring": 180.0,
    "lending": 120.0,
    "trainer": 600.0,
    "engine": 900.0,
}
"""Methods of ``Stages`` in their order, and the seconds that each may take."""
_TARGET = "verl_rc.preflight.bring_up.stages:Stages"


@dataclass
class Report:
    """The result of a stage."""

    numbers: dict[str, Any] = field(default_factory=dict)
    """Measured seconds, bytes and nats by name."""
    findings: list[Finding] = field(default_factory=list)


def bring_up(config: RunConfig, file: Path, limits: Mapping[str, float] = STAGES) -> Iterator[Finding]:
    """Run the stages of ``limits`` (seconds by name), each in a separate process, and yield their findings.

    A stage that fails, hangs or is killed does not end the others. ``file`` is written after every stage:
    JSON with status, seconds, numbers and findings by stage.
    """
    results: dict[str, object] = {}
    for name, limit in limits.items():
        start = time.perf_counter()
        report, problem = _run(config, name, limit)
        findings = [problem] if report is None else report.findings
        yield from findings
        results[name] = {
            "status": "failed" if any(finding.status == "failed" for finding in findings) else "ok",
            "seconds": round(time.perf_counter() - start, 3),
            "numbers": {} if report is None else report.numbers,
            "findings": [asdict(finding) for finding in findings],
        }
        file.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")


def _run(config: RunConfig, name: str, limit: float) -> tuple[Report | None, Finding]:
    """The report of a stage, or None, and the finding that says why there is none."""
    process = ChildProcess(_TARGET, {}, wait=False, timeout_seconds=limit, config=config)
    try:
        process.answer()
        process.ask(name, timeout_seconds=limit)
        return process.answer(), Finding("ok", name, "")
    except HangError:
        process.kill()
        return None, Finding(
            "failed",
            name,
            f"no answer after {limit:.0f} s",
            f"it must end within {limit:.0f} s",
            "look where it hangs (py-spy dump), at the disk that the model is read from, or at "
            "NCCL_DEBUG=INFO",
        )
    except RemoteError as error:
        return None, Finding(
            "failed",
            name,
            str(error).strip(),
            "it must end without an error",
            f"read the message; --only={name} runs this stage alone",
        )
    finally:
        process.end(5.0)
