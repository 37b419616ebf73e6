"""A frontend's end of a connection to the core, as a ZeroMQ socket."""

import secrets

import zmq

from quire.ipc.links.curve import FrontendKeys
from quire.ipc.messages.message import IDENTITY_BYTES

SEND_HWM, RECEIVE_HWM = 8192, 256  # messages


def new_dealer(context: zmq.Context, address: str, keys: FrontendKeys | None, max_message: int) -> zmq.Socket:
    """A DEALER with a new identity for one connection to the core at `address`, which it is not connected to yet."""
    socket = context.socket(zmq.DEALER)
    # Identities that begin with a zero byte are reserved by libzmq.
    socket.set(zmq.ROUTING_ID, bytes([1 + secrets.randbelow(255)]) + secrets.token_bytes(IDENTITY_BYTES - 1))
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RECONNECT_IVL, -1)  # a frontend reconnects itself: a new connection needs a new identity
    socket.set(zmq.SNDHWM, SEND_HWM)
    socket.set(zmq.RCVHWM, RECEIVE_HWM)
    socket.set(zmq.MAXMSGSIZE, max_message)
    socket.set(zmq.IPV6, int("[" in address))
    if keys is not None:
        socket.set(zmq.CURVE_SERVERKEY, keys.core_public)
        socket.set(zmq.CURVE_PUBLICKEY, keys.own.public)
        socket.set(zmq.CURVE_SECRETKEY, keys.own.secret)
    return socket
