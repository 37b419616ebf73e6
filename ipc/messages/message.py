"""Message, the base of every message between processes, and constants that all receivers share.

The messages are frozen msgspec structs, one tagged union per direction, encoded with msgpack as arrays: frontend.py (frontends
and core), workers.py (workers and core), hosts.py (core and the agents of other hosts). group.py, utilities.py and stats.py are
parts of these. Arrays of numbers travel as little-endian bytes; a receiver reads them with numpy.frombuffer. Data of every step
is in ipc/step/.
"""

import msgspec

MAX_CORE_MESSAGE = 256 << 20  # bytes of a message to or from the core: a tokenizer file, prompt logprobs
IDENTITY_BYTES = 16  # of a connection to the core, random

# Errors that decoding hostile bytes can raise: msgspec's, bad UTF-8, deep nesting, a claimed length beyond all memory.
DECODE_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: frozen, encoded as an array with the tag as its first element."""
