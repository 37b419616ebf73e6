"""Messages of any length on a stream socket between a process and its AskedChild (asked_child.py), and limits for the child.

A message is its length in 8 bytes, little-endian, and then its bytes.
"""

import os
import resource
import select
import socket

_LENGTH = 8


def is_readable(sock: socket.socket, timeout_s: float) -> bool:
    """Wait up to timeout_s; whether there is something to receive, or the other end is gone."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(len(data).to_bytes(_LENGTH, "little") + data)


def receive(sock: socket.socket) -> bytes:
    """The next message; empty if the other end is gone."""
    header = _exactly(sock, _LENGTH)
    return _exactly(sock, int.from_bytes(header, "little")) if len(header) == _LENGTH else b""


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size and (part := sock.recv(min(size - len(parts), 1 << 20))):
        parts += part
    return bytes(parts) if len(parts) == size else b""


def data_bytes() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def limit_this_process(more_bytes: int) -> None:
    """Allow this much more memory, no core file, and no output on stderr: last words of a crash must not reach the operator."""
    limit = data_bytes() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
