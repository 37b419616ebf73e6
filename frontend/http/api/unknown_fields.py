"""Body fields that mean nothing here: each name is said once in the log, so that a misspelt one can be found.

They are ignored all the same, as OpenAI's clients send new ones now and then. A client chooses the names: what is kept and
logged of them is bounded.
"""

import logging
from collections.abc import Set

import msgspec

logger = logging.getLogger("quire.http")

_MAX_NAMES = 100
_MAX_NAME_CHARS = 64

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnknownFields:
    """The names said so far."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def look_at(self, data: bytearray, known: Set[str]) -> None:
        """data: a JSON object with other fields than the known ones. Values are not decoded but skipped: some ms for 8 MiB."""
        if len(self._said) >= _MAX_NAMES:
            return
        for name in _decoder.decode(data).keys() - known:
            name = name[:_MAX_NAME_CHARS]
            if name not in self._said and len(self._said) < _MAX_NAMES:
                self._said.add(name)
                logger.warning("ignored: a request's field %r is not known here (said once for each name)", name)
