"""Cut long images out of a JSON body before it is decoded: the decoder holds the interpreter, 3 ms a MiB, and copies them.

They are found with numpy, without the interpreter's lock: quotes that are more than MIN_BYTES apart, behind the names under
which the APIs send images, with nothing escaped between them. A random word takes a string's place; `Request.cut_out` has what
it stands for, a view of the body. Strings that are not found this way, as those with escapes, are decoded like any other.
"""

import re
import secrets

import numpy as np

MIN_BYTES = 64 << 10
_PIECE = 4 << 20  # searched at once
_BEFORE = 256  # bytes that show under which name a string stands
_QUOTE, _BACKSLASH = b'"\\'
# The keys before an image's quote: OpenAI's image_url, Anthropic's source with its data, Ollama's list of images.
_IMAGE = re.compile(
    rb"""(?: "image_url"\s*:\s*(?:\{\s*(?:"detail"\s*:\s*"\w*"\s*,\s*)?"url"\s*:\s*)?
        | "source"\s*:\s*\{[^{}]{0,160}"data"\s*:\s*
        | "images"\s*:\s*\[\s*
        )\Z""",
    re.VERBOSE,
)
_NEXT = re.compile(rb"\s*,\s*")  # between two images of one list


def cut_images(body: bytearray) -> tuple[bytearray, dict[str, memoryview]]:
    """The body without its long images, and those by the words in their places; the same body if there are none."""
    found = _long_images(body)
    if not found:
        return body, {}
    view, secret = memoryview(body), secrets.token_hex(16)
    parts: list[bytes | memoryview] = []
    cut, at = {}, 0
    for number, (begin, end) in enumerate(found):
        word = f"media:{secret}:{number}"
        cut[word] = view[begin:end]
        parts += (view[at:begin], word.encode())
        at = end
    return bytearray(b"".join([*parts, view[at:]])), cut


def _long_images(body: bytearray) -> list[tuple[int, int]]:
    """(begin, end) of the contents of long strings that are images, in order."""
    data = np.frombuffer(body, np.uint8)
    quotes = np.concatenate([start + np.flatnonzero(data[start : start + _PIECE] == _QUOTE)
                             for start in range(0, len(data), _PIECE)] or [np.empty(0, np.int64)])  # fmt: skip
    found: list[tuple[int, int]] = []
    for i in np.flatnonzero(np.diff(quotes) > MIN_BYTES + 1).tolist():
        opening, closing = int(quotes[i]), int(quotes[i + 1])
        if _stands_for_image(body, opening, found) and not (data[opening + 1 : closing] == _BACKSLASH).any():
            found.append((opening + 1, closing))
    return found


def _stands_for_image(body: bytearray, opening: int, found: list[tuple[int, int]]) -> bool:
    if _IMAGE.search(bytes(body[max(0, opening - _BEFORE) : opening])):
        return True
    if not found or opening - found[-1][1] > _BEFORE:
        return False
    return _NEXT.fullmatch(bytes(body[found[-1][1] + 1 : opening])) is not None
