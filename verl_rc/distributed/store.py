"""Where the members of a process group find each other."""

import socket
from datetime import timedelta

import torch.distributed as dist


def open_store(host: str, port: int, world_size: int, is_server: bool, timeout: timedelta) -> dist.TCPStore:
    """Serve, or connect to, a key-value store; the server listens at ``host`` alone.

    torch would listen on every interface, and whoever reaches a store can write into it.
    """
    if not is_server:
        return dist.TCPStore(host, port, world_size, False, timeout, wait_for_workers=True)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    return dist.TCPStore(
        host, port, world_size, True, timeout, wait_for_workers=True, master_listen_fd=listener.detach()
    )
