"""Ranks on two nodes whose hostnames resolve to 127.0.1.1 find each other, in the trainer's group and in a
transfer group."""

import json
import subprocess
import sys
from pathlib import Path

from namespaces import network_of

ROOT = Path(__file__).parents[2]


def test_ranks_use_the_interface_that_ray_uses(tmp_path: Path) -> None:
    """F1: left to itself, each rank would wait for the other at 127.0.1.1."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    program = [sys.executable, str(ROOT / "tests" / "helpers" / "runs" / "rank_on_node.py")]
    with network_of(tmp_path, 1, 2) as (_, nodes):
        ranks = [
            node.start(
                [*program, str(rank), node.address, str(tmp_path)],
                environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank, node in enumerate(nodes)
        ]
        said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for output, _ in said:
        found = json.loads(output.splitlines()[-1])
        assert found == {"summed": [11.0] * 3, "sent": [0.0, 1.0, 2.0, 3.0], "hostname": "127.0.1.1"}
