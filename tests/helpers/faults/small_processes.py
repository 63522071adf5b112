"""Processes of Ray that fail, hang or wait for each other on request."""

import os
import signal
import time

from verl_rc.trainer.cluster.remote import RemoteProcess, wait_for_all


def start_small_processes(*names: str) -> list[RemoteProcess]:
    """One process for each name, in the Ray that is here."""
    processes = [RemoteProcess(name, {}) for name in names]
    wait_for_all([process.build("small_processes:SmallProcess") for process in processes])
    return processes


class SmallProcess:
    """Does what it is told, and little else."""

    def pid(self) -> int:
        return os.getpid()

    def complain(self, text: str) -> None:
        raise ValueError(text)

    def threads(self) -> int:
        """Of torch, which reads ``OMP_NUM_THREADS`` when it is imported."""
        import torch

        return torch.get_num_threads()

    def nap(self) -> None:
        time.sleep(3600)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def join(self, rank: int, port: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def reduce(self) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1))
