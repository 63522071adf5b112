"""One of two trainer ranks with a sharded model and a sender, as an object for a process of its own."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from weight_borrowers import CPU, linear_stack

from verl_rc.runtime.weight_sync.sender import ModelWeights, SendReceipt, WeightSender
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle


class ShardedRank:
    """``linear_stack`` over two ranks, lent in bf16."""

    def __init__(self, rank: int, store_path: str) -> None:
        store = dist.FileStore(store_path, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
        self.model: Any = linear_stack()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.sender = WeightSender(ModelWeights(self.model), rank, CPU, "bfloat16", bucket_bytes=64)

    def num_buckets(self) -> int:
        return self.sender.num_buckets()

    def count_gathers(self) -> None:
        """Note the bytes that this rank gives to each collective from now on."""
        self.gathered: list[int] = []
        gather = dist.all_gather_single

        def counted(everyone: Any, mine: Any, group: Any) -> None:
            self.gathered.append(mine.nbytes)
            gather(everyone, mine, group=group)

        dist.all_gather_single = counted

    def gathers(self) -> list[int]:
        return self.gathered

    def local_elements(self) -> int:
        return sum(p.to_local().numel() for p in self.model.parameters())

    def offer(self, index: int, share: bool) -> BucketHandle:
        return self.sender.offer(index, share)

    def release(self) -> SendReceipt:
        return self.sender.release()
