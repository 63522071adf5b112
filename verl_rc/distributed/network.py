"""This node's network: the interface that carries an address, and ports that their owner binds before it
tells them.

Imports nothing heavy: processes need it before their environment is complete.
"""

import socket
from typing import Any

import psutil

_LISTENERS: dict[tuple[str, int], socket.socket] = {}
"""Sockets that listen already and that no server has taken yet."""


def interface_of(address: str) -> str:
    """The name of the network interface that carries an IP address of this node."""
    found: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, carried in found.items():
        # Link-local IPv6 addresses end in "%interface".
        if any(one.address.partition("%")[0] == address for one in carried):
            return name
    raise ValueError(
        f"no network interface of this node has the address {address}, under which Ray knows the node; there "
        f"are {', '.join(found)}. Set GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and VLLM_HOST_IP on the node "
        "before its Ray is started."
    )


def network_variables(address: str) -> dict[str, str]:
    """Environment with which gloo, NCCL and vLLM use the interface of this ``address``.

    Left to themselves, gloo and vLLM take what the hostname resolves to, which is 127.0.1.1 on Debian and
    Ubuntu.
    """
    name = interface_of(address)
    # "=": otherwise NCCL takes every interface whose name begins so.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}", "VLLM_HOST_IP": address}


def listen(host: str) -> int:
    """Bind a free port of ``host`` and listen there until ``take_listener``; returns the port.

    A port that is found free and bound later may be another process's by then.
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
