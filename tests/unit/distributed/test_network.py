"""Ports are bound before they are told."""

import os
import socket
from datetime import timedelta

import pytest

from verl_rc.distributed.network import listen, take_listener
from verl_rc.distributed.process_group import open_store

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
