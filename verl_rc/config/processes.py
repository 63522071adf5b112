"""Processes of this machine, as the kernel shows them."""

from pathlib import Path


def process_status(pid: int) -> tuple[str, int] | None:
    """State letter and start time, in clock ticks since boot, of a process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[19])
