"""Messages between a frontend and the children that preprocess its media: msgpack over framing.py's socket."""

from typing import Any

import msgspec

from quire.ipc.messages.media import MediaTensor


class ChildConfig(msgspec.Struct, frozen=True):
    """files: of the checkpoint, by name. processor_options: --mm-processor-kwargs. max_bytes: memory beyond what it has when it
    is ready."""

    socket_fd: int
    files: dict[str, bytes]
    processor_options: dict[str, Any]
    max_bytes: int


class Ready(msgspec.Struct, frozen=True):
    """A child's first message. error: why it cannot work. cage_error: why it works without its sandbox."""

    error: str = ""
    cage_error: str = ""


class Question(msgspec.Struct, frozen=True):
    """One image. shape: of uint8 values; None: data is a file. options: settings of the processor for this image."""

    data: bytes
    shape: list[int] | None = None
    low_detail: bool = False
    options: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True):
    """The tensors that the image has become. size: width and height after decoding. data: each tensor's values,
    little-endian. pieces: its tokens in order: a token's text, or "" for rows of embeddings, and how many.

    error: why there is nothing, for the client.
    """

    error: str = ""
    size: list[int] = []
    tensors: list[MediaTensor] = []
    data: list[bytes] = []
    pieces: list[tuple[str, int]] = []
    positions: list[list[int]] = []
    advance: int = 0
    rescale: tuple[list[float], list[float]] | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of embeddings."""
        return sum(count for text, count in self.pieces if not text)
