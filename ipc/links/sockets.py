"""Typed tests whether a ZeroMQ socket can receive or send without waiting."""

import zmq

_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)  # as ints: the enumeration's & is Python code, a third of the time


def readable(socket: zmq.Socket) -> bool:
    """Whether a message can be received now. Takes a microsecond; a failed attempt to receive takes several."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def writable(socket: zmq.Socket) -> bool:
    """Whether a message can be queued now."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLOUT)
