"""Read an item's bytes from wherever a request says they are: in the request, at an address, in a file.

A `Source` is made from a request's part (parts.py), or from Python objects (offline.py). Everything is bounded by the bytes
that are left for its request.
"""

import base64
import binascii
import os
import stat
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import unquote

from quire.frontend.client.turns import in_native_thread
from quire.frontend.media.errors import MediaError
from quire.frontend.media.fetch import Fetcher

_PIECE = 256 << 10  # of base64: decoding it holds the interpreter for 2 ms
_AT_ONCE = 64 << 10
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_BROKEN = "the base64 text is broken"

ReadFile = Callable[[str, int], Awaitable[bytes | None]]  # a file's id and the most bytes -> its content


class Source(NamedTuple):
    """An item as a request names it. One of url, text, data and file_id is set.

    place: the field that errors name. text: base64. data: the bytes of a file, or with `shape` of uint8 values.
    """

    place: str = ""
    kind: str = "image"
    url: str = ""
    text: str | bytes | memoryview | None = None
    data: bytes | None = None
    shape: tuple[int, ...] | None = None
    file_id: str = ""
    low_detail: bool = False


class Reader:
    """local_path: the folder of file: addresses, "" for none. read_file: reads the files of a key; None: there are none."""

    def __init__(self, fetcher: Fetcher, local_path: str) -> None:
        self._fetcher = fetcher
        self._local_path = os.path.realpath(local_path) if local_path else ""

    async def read(self, source: Source, owner: str, most: int, read_file: ReadFile | None) -> bytes:
        """The item's bytes, at most `most`. Raises MediaError, MediaBusy."""
        if source.data is not None:
            return source.data
        if source.text is not None:
            return await decoded(source.text, most)
        if source.file_id:
            found = await read_file(source.file_id, most) if read_file is not None else None
            if found is None:
                raise MediaError(f"there is no file {source.file_id[:64]!r}", code="file_not_found")
            return found
        scheme = source.url[:8].partition(":")[0].lower()
        match scheme:
            case "data":
                head, comma, text = source.url.partition(",")
                if not comma or not head.lower().endswith(";base64"):
                    raise MediaError("a data: URL must be like data:image/png;base64,...")
                return await decoded(text, most)
            case "http" | "https":
                return await self._fetcher.fetch(source.url, owner, most)
            case "file":
                return await in_native_thread(self._local, source.url, most)
        raise MediaError("the address must begin with data:, http:// or https://")

    def _local(self, url: str, most: int) -> bytes:
        """A file below the folder. It is opened once, and what was opened is checked."""
        if not self._local_path:
            raise MediaError(
                "this server reads no files of its own (see --allowed-local-media-path); send the image itself as a data: URL",
                code="media_not_allowed",
            )
        rest = url[len("file:") :]
        path = unquote(rest[2:] if rest.startswith("//") else rest)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError):
            raise _no_file() from None
        try:
            real, status = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
            if os.path.commonpath((self._local_path, real)) != self._local_path or not stat.S_ISREG(status.st_mode):
                raise _no_file()
            if status.st_size > most:
                raise too_many_bytes(most)
            with open(fd, "rb", closefd=False) as file:
                return file.read(most)
        except OSError:
            raise _no_file() from None
        finally:
            os.close(fd)


def _no_file() -> MediaError:
    return MediaError("there is no such file that this server may read", code="media_not_allowed")


def too_many_bytes(most: int) -> MediaError:
    return MediaError(f"the images have more than the {most} bytes that a request may hold", code="media_too_large")


async def decoded(text: str | bytes | memoryview, most: int) -> bytes:
    """Base64 to bytes, in a thread and in pieces if it is long. Raises MediaError."""
    if len(text) // 4 * 3 > most + 3:
        raise too_many_bytes(most)
    if len(text) <= _AT_ONCE:
        return _decoded(text)
    return await in_native_thread(_decoded, text)


def _decoded(text: str | bytes | memoryview) -> bytes:
    try:
        raw = memoryview(text.encode("ascii")) if isinstance(text, str) else memoryview(text)
        parts = []
        for start in range(0, len(raw), _PIECE):
            parts.append(binascii.a2b_base64(raw[start : start + _PIECE], strict_mode=True))
        return b"".join(parts)
    except (ValueError, UnicodeEncodeError):  # line breaks, the URL's alphabet, or no padding
        return _decoded_leniently(text)


def _decoded_leniently(text: str | bytes | memoryview) -> bytes:
    try:
        raw = text.encode("ascii") if isinstance(text, str) else bytes(text)
        raw = b"".join(raw.split()).translate(_URL_SAFE)
        return base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
    except (ValueError, UnicodeEncodeError):
        raise MediaError(_BROKEN) from None
