"""This node's network: the interface of an address, and ports that their owner binds before it announces
them.

Imports nothing heavy: processes need it before their environment is complete.
"""

import socket
from typing import Any

import psutil

_LISTENERS: dict[tuple[str, int], socket.socket] = {}
"""Listening sockets that no server has taken yet, by host and port."""


def interface_of(address: str) -> str:
    """The name of the network interface with an IP ``address`` of this node."""
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        # Link-local IPv6 addresses end in "%interface".
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    raise ValueError(
        "a network interface of this node must have the address under which Ray knows the node, got the "
        f"address {address} and the interfaces {', '.join(interfaces)}. Set GLOO_SOCKET_IFNAME, "
        "NCCL_SOCKET_IFNAME and VLLM_HOST_IP on the node before its Ray is started."
    )


def network_variables(address: str) -> dict[str, str]:
    """Environment with which gloo, NCCL and vLLM use the interface of this ``address``.

    By default gloo and vLLM use the address of the hostname, which is 127.0.1.1 on Debian and Ubuntu.
    """
    name = interface_of(address)
    # "=": otherwise NCCL takes every interface whose name begins with this one.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}", "VLLM_HOST_IP": address}


def listen(host: str) -> int:
    """Bind a free port of ``host`` and listen there until ``take_listener``; returns the port.

    Another process may take a port between a search for a free one and its binding.
    """
    listener = _listener(host, 0)
    port = int(listener.getsockname()[1])
    _LISTENERS[host, port] = listener
    return port


def take_listener(host: str, port: int) -> socket.socket:
    """The socket of ``listen``, or a new one where this process does not listen there yet."""
    return _LISTENERS.pop((host, port), None) or _listener(host, port)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    return listener
