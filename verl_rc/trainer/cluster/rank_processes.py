"""The processes of the trainer: one for each rank, with that rank of every role."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_rc.config.run import RunConfig
from verl_rc.runtime.distributed.child_process import ProcessLostError
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.workers.environment import LOOPBACK, trainer_environment
from verl_rc.trainer.cluster.placement import Placement
from verl_rc.trainer.cluster.remote import Pending, RemoteProcess, wait_for_all


@dataclass(frozen=True)
class Rank:
    """A handle of one rank of one role."""

    process: RemoteProcess
    role: str
    name: str
    """The name in messages and traces."""

    def call(self, method: str, *arguments: Any) -> Pending:
        """Call a method of the role's worker."""
        return self.process.call("call", self.role, method, *arguments, task=method, name=self.name)


class RankProcesses:
    """One process for each rank of the trainer.

    Ranks of all roles with the same number are objects of one process: with it they share a device, its
    context and the process group of all ranks, of which each role makes the meshes that its configuration
    asks for.
    """

    worker = "verl_rc.runtime.workers.trainer_rank:TrainerRank"

    def __init__(
        self, placement: Placement, sharing: Mapping[str, int], shares_prefixes: bool, balances: bool = True
    ) -> None:
        """Start the processes; ``build`` loads the models. ``sharing``: by role, ranks that share the tokens
        of their rows. ``shares_prefixes``: tokens that rows have in common are computed once. ``balances``:
        ranks get equal numbers of tokens rather than of rows."""
        environment = trainer_environment(placement.trainer_threads, placement.one_node)
        self.sharing = sharing
        self.shares_prefixes = shares_prefixes
        self.balances = balances
        self._host = LOOPBACK if placement.one_node else None
        self._processes = [
            RemoteProcess(f"{_listed(list(sharing))} rank {rank}", environment, **place.options())
            for rank, place in enumerate(placement.rank_places)
        ]

    def ranks_of(self, role: str) -> list[Rank]:
        """All ranks of a role."""
        return [Rank(process, role, f"{role} rank {rank}") for rank, process in enumerate(self._processes)]

    def build(self, workers: Mapping[str, str], config: RunConfig, total_steps: int) -> list[Pending]:
        """Load and shard the models of all roles, given with their workers, one role after the other; returns
        at once."""
        host, port = self.listen()
        addresses = [
            RankAddress(rank, len(self._processes), host, port) for rank in range(len(self._processes))
        ]
        return [
            process.build(
                self.worker, workers=dict(workers), config=config, address=address, total_steps=total_steps
            )
            for process, address in zip(self._processes, addresses, strict=True)
        ]

    def require_nodes(self) -> None:
        """Raise ``ProcessLostError`` when the node of a rank has left the cluster."""
        lost = [process.name for process in self._processes if process.node_is_gone()]
        if lost:
            raise ProcessLostError(
                f"the node of {', '.join(lost)} has left the cluster. Start Ray on it again, or on another "
                "one (scripts/cluster/start_worker.sh), and then the same command: it goes on from the last "
                "checkpoint."
            )

    def visible_devices(self) -> list[str]:
        """The GPU of each rank in terms of ``CUDA_VISIBLE_DEVICES``; empty strings on a CPU."""
        devices: list[str] = wait_for_all([process.visible_devices() for process in self._processes])
        return devices

    def gpu_bytes(self) -> int:
        """Memory of the first rank's GPU."""
        size: int = wait_for_all([self._processes[0].gpu_bytes()])[0]
        return size

    def listen(self) -> tuple[str, int]:
        """Host and port at which the first rank waits for the other members of a group."""
        host, port = wait_for_all([self._processes[0].listen(self._host)])[0]
        return host, port

    def refresh_reference(self) -> list[Pending]:
        """Give the reference policy the actor's weights, on all ranks."""
        return [process.call("refresh_reference") for process in self._processes]

    def switch_trace(self, rank: int, path: Path | None) -> Pending:
        """Begin or write the trace of a rank; see ``StepTrace.switch``."""
        return self._processes[rank].call("switch_trace", path)

    def close(self) -> None:
        """Ask every rank to leave the process group."""
        wait_for_all([process.call("close") for process in self._processes], timeout_seconds=60)


def _listed(roles: Sequence[str]) -> str:
    """``actor``, ``actor and critic``, ``actor, critic and reference``."""
    *first, last = roles
    return f"{', '.join(first)} and {last}" if first else last
