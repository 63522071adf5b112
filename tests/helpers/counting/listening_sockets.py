"""On which addresses processes listen."""

import os
import re
from contextlib import suppress
from pathlib import Path


def listening(pids: set[str]) -> set[tuple[str, str]]:
    """Address and port, as the kernel writes them, of every TCP socket on which one of the processes
    listens."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[fields[9]] = tuple(fields[1].split(":"))
    found = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            match = (
                re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
                if descriptor.is_symlink()
                else None
            )
            if match and match[1] in sockets:
                found.add(sockets[match[1]])
    return found


def family(pid: str) -> set[str]:
    """A process and all its descendants."""
    children = list[str]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # its thread has ended since
            children += path.read_text().split()
    return {pid}.union(*(family(child) for child in children))
