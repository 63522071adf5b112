"""Ranks and engines on a cluster of two Ray nodes: placement alone, with processes that only tell where they
are."""

import json
import os
import secrets
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What ``two_nodes.py`` says about each of its cases, in a cluster that asks for a token."""
    token = tmp_path_factory.mktemp("cluster") / "token"
    token.write_text(secrets.token_hex(32))
    settings = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
        "1"  # tests that ran Ray here kept it to the loopback interface
    )
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "runs" / "two_nodes.py")]
    result = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def parts_by_node(case):
    by_node = defaultdict(list)
    for part, node, _ in case["found"]:
        by_node[node].append(part)
    return by_node


def test_a_node_holds_a_rank_and_the_engine_that_shares_its_device(report):
    case = report["shared devices"]
    by_node = parts_by_node(case)
    assert len(report["nodes"]) == 2
    assert set(by_node) == set(report["nodes"])
    assert sorted(by_node.values()) == [["rank 0", "engine 0"], ["rank 1", "engine 1"]]
    assert len({process for _, _, process in case["found"]}) == 4
    assert not case["one_node"]  # else processes would talk to each other over the loopback interface


def test_engines_with_devices_of_their_own_fill_both_nodes(report):
    by_node = parts_by_node(report["own devices"])
    assert set(by_node) == set(report["nodes"])
    assert sorted(part for parts in by_node.values() for part in parts) == [
        "engine 0",
        "engine 1",
        "rank 0",
        "rank 1",
    ]
    assert {len(parts) for parts in by_node.values()} == {2}


def test_engines_may_get_another_node_than_that_of_all_ranks(report):
    case = report["engines beside the ranks' node"]
    assert sorted(parts_by_node(case).values()) == [["engine 0", "engine 1"], ["rank 0", "rank 1"]]
    assert not case["one_node"]


def test_more_nodes_than_there_are_is_a_configuration_error(report):
    assert "trainer.nnodes=3 nodes are needed, the cluster has 2" in report["three nodes"]["refused"]
