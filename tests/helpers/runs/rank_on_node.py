"""One of two ranks, each on a node of its own: ``python rank_on_node.py RANK ADDRESS FOLDER``.

Joins the trainer group and a transfer group as a run does, and prints what arrived as JSON.
"""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from verl_rc.runtime.distributed.network import listen, network_variables


def meet(folder: Path, name: str, rank: int, address: str) -> tuple[str, int]:
    """Where rank 0 listens: it binds the port first and tells it then."""
    path = folder / name
    if rank == 0:
        path.with_suffix(".new").write_text(json.dumps((address, listen(address))))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.05)
    host, port = json.loads(path.read_text())
    return host, port


def main(rank: int, address: str, folder: Path) -> None:
    """Two collectives, and what they gave."""
    os.environ.update(network_variables(address))
    import torch
    import torch.distributed as dist

    from verl_rc.runtime.distributed.process_group import (
        RankAddress,
        all_reduce_sum,
        join_trainer_group,
        leave_trainer_group,
    )
    from verl_rc.runtime.weight_sync.transfer_group import (
        TransferAddress,
        broadcast_from_sender,
        join_transfer_group,
    )

    mesh = join_trainer_group(
        RankAddress(rank, 2, *meet(folder, "trainer", rank, address)), torch.device("cpu"), 60
    )
    summed = all_reduce_sum(torch.full((3,), 10.0**rank), mesh)
    group = join_transfer_group(
        TransferAddress(*meet(folder, "transfer", rank, address), 2, 60.0), rank, "gloo"
    )
    sent = torch.arange(4.0) if rank == 0 else torch.zeros(4)
    broadcast_from_sender(group, sent)
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    hostname = socket.gethostbyname(socket.gethostname())
    sys.stdout.write(
        json.dumps({"summed": summed.tolist(), "sent": sent.tolist(), "hostname": hostname}) + "\n"
    )
    leave_trainer_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
