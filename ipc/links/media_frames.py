"""MediaData on the wire: its first frame is the message, and each further frame holds the bytes of one tensor."""

import msgspec

from quire.ipc.media import MAX_TENSORS
from quire.ipc.messages.media import MediaData
from quire.ipc.messages.message import DECODE_ERRORS

_decoder = msgspec.msgpack.Decoder(MediaData)


def with_frames(frames: list[bytes]) -> MediaData | None:
    """The message with its tensors; None if the frames are something else, or too many."""
    if not 1 < len(frames) <= 1 + MAX_TENSORS:
        return None
    try:
        message = _decoder.decode(frames[0])
    except DECODE_ERRORS:
        return None
    return msgspec.structs.replace(message, tensors=frames[1:])
