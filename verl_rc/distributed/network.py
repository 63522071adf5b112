"""Ports that their owner binds before it tells them. Imports nothing heavy."""

import socket

_LISTENERS: dict[tuple[str, int], socket.socket] = {}
"""Sockets that listen already and that no server has taken yet."""


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
