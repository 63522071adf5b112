"""Writing shards beside the training: a copy is taken at once, a thread of its own writes it."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from verl_rc.checkpoint.shards import Shards, write_shards


class BackgroundWriter:
    """Writes one set of shards at a time, while the model they came from goes on learning.

    The copy lies in host memory, which is kept for the next save: 12 bytes per parameter for fp32 weights and Adam's two
    moments.
    """

    def __init__(self, pin_memory: bool) -> None:
        """Collective: the threads of all ranks meet in a group of their own, since a group serves one thread at a time.

        ``pin_memory``: the copy comes from a GPU, which is faster to memory that it can reach by itself.
        """
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pin_memory,
                use_non_blocking_copy=pin_memory,
                use_shared_memory=False,
                use_async_staging=False,
            )
        )
        self._writing: Future[None] | None = None

    def start(self, folder: Path, shards: Shards) -> None:
        """Copy ``shards`` as they are now and have them written to ``folder``, after what is being written; collective."""
        self.has_ended(wait=True)
        tensors: Any = self._stager.stage(shards.tensors)  # a future only with use_async_staging
        self._writing = self._thread.submit(write_shards, folder, replace(shards, tensors=tensors), self._group)

    def has_ended(self, wait: bool) -> bool:
        """Whether nothing is being written any more; ``wait`` until that is so. Raises the ``CheckpointError`` it ended in."""
        if self._writing is None:
            return True
        if not wait and not self._writing.done():
            return False
        ended, self._writing = self._writing, None
        ended.result()
        return True
