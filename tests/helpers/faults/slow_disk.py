"""A trainer rank whose disk is slow: a checkpoint takes three seconds before its first byte, and three before
its last file."""

import time
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from verl_rc.runtime.workers.policy_worker import PolicyWorker


class SlowlySavingPolicyWorker(PolicyWorker):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        for name in ("write_data", "finish"):
            setattr(FileSystemWriter, name, delayed(getattr(FileSystemWriter, name)))


def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
    def later(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(3.0)
        return function(*arguments, **keywords)

    return later
