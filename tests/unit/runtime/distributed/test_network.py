"""Ports are bound before they are told, and a node's interface is found by its address."""

import os
import socket
from datetime import timedelta

import psutil
import pytest

from verl_rc.runtime.distributed.network import interface_of, listen, network_variables, take_listener
from verl_rc.runtime.distributed.process_group import open_store

HERE = "127.0.0.1"


def test_a_port_that_was_told_belongs_to_its_owner() -> None:
    """F2: a port that was probed and closed again could be another process's by the time it is used."""
    port = listen(HERE)
    with pytest.raises(OSError, match="in use"):
        socket.create_server((HERE, port))
    with socket.create_connection((HERE, port), timeout=10), take_listener(HERE, port) as listener:
        assert listener.getsockname() == (HERE, port)
        assert os.get_inheritable(listener.fileno()) is False  # else an engine's children would hold the port


def test_a_store_is_served_at_the_port_that_was_told() -> None:
    port = listen(HERE)
    store = open_store(HERE, port, 1, True, timedelta(seconds=60))
    store.set("key", "value")
    assert open_store(HERE, port, 1, False, timedelta(seconds=60)).get("key") == b"value"


def test_the_interface_of_an_address() -> None:
    """F1: by the address under which Ray knows the node, which may be the second one of an interface."""
    carried = {one.address: name for name, addresses in psutil.net_if_addrs().items() for one in addresses}
    ipv4 = [address for address in carried if address.count(".") == 3]
    assert [interface_of(address) for address in ipv4] == [carried[address] for address in ipv4]
    name = carried[HERE]
    assert network_variables(HERE) == {
        "GLOO_SOCKET_IFNAME": name,
        "NCCL_SOCKET_IFNAME": f"={name}",
        "VLLM_HOST_IP": HERE,
    }


def test_an_address_that_no_interface_carries() -> None:
    with pytest.raises(
        ValueError,
        match=r"got the address 203\.0\.113\.9.* Set GLOO_SOCKET",
    ):
        interface_of("203.0.113.9")
