"""Messages of any length on a stream socket between a process and one that works in its place, and limits of the latter.

The process's side is asked_child.py. A message is its length in 8 bytes, little-endian, and so many bytes.
"""

import os
import resource
import select
import socket

_LENGTH = 8


def is_readable(sock: socket.socket, timeout_s: float) -> bool:
    """Whether there is something to receive, or the other end is gone, within timeout_s."""
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
    """What RLIMIT_DATA counts of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def limit_this_process(more_bytes: int) -> None:
    """So much more memory, no core file, and nothing on stderr: what is said before an end is not the operator's business."""
    limit = data_bytes() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
