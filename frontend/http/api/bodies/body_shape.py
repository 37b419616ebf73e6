"""Estimate how long a JSON body takes to decode, before it is decoded: the decoder holds the interpreter while it works.

Eight MiB of text are decoded in 5 ms, eight MiB of empty lists in a second. So large bodies are weighed first, with numpy and
without the interpreter's lock: the values outside of strings, each by its cost. app.py calls this for every route, in a thread.
"""

import numpy as np

from quire.frontend.http.protocol.errors import ApiError

WEIGHED_BYTES = 256 << 10  # smaller bodies are decoded in 10 ms, whatever they contain
MAX_WEIGHT = 1_250_000  # 1 M token ids, or 100,000 objects with a field or two: some 35 ms
_OF_CONTAINER, _OF_NAME, _OF_VALUE = 5, 4, 1  # in units of 30 ns

_QUOTE, _BACKSLASH, _COMMA, _COLON, _LIST, _OBJECT = b'"\\,:[{'


def check_shape(body: bytes | bytearray) -> None:
    """Raises ApiError 400 for a body that would take too long to decode."""
    weight = weight_of(body)
    if weight > MAX_WEIGHT:
        raise ApiError(
            400,
            f"The request's JSON holds too much: {weight} units of at most {MAX_WEIGHT}, where a value counts {_OF_VALUE}, a "
            f"field's name {_OF_NAME} and a list or an object {_OF_CONTAINER}. Send less at once, or texts instead of lists.",
            code="body_too_complex",
        )


def weight_of(body: bytes | bytearray) -> int:
    """The weight of all values outside of strings; an arbitrary number if the body is not JSON."""
    data = np.frombuffer(body, np.uint8)
    outside = ~_in_strings(data)

    def number(byte: int) -> int:
        return int(np.count_nonzero((data == byte) & outside))

    containers = number(_LIST) + number(_OBJECT)
    return _OF_CONTAINER * containers + _OF_NAME * number(_COLON) + _OF_VALUE * (number(_COMMA) + 1)


def _in_strings(data: np.ndarray) -> np.ndarray:
    """bool [bytes]: true from each string's opening quote up to, not including, its closing one."""
    quotes = data == _QUOTE
    backslashes = np.flatnonzero(data == _BACKSLASH)
    if len(backslashes):  # the byte after a run of an odd number of them is escaped
        ends = np.flatnonzero(np.diff(backslashes, append=len(data) + 1) != 1)
        lengths = np.diff(ends, prepend=-1)
        escaped = backslashes[ends[lengths % 2 == 1]] + 1
        quotes[escaped[escaped < len(data)]] = False
    return np.logical_xor.accumulate(quotes)
