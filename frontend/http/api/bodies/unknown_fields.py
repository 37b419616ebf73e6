"""Body fields that mean nothing here: each name is said once in the log, so that a misspelt one can be found.

They are ignored all the same, as OpenAI's clients send new ones now and then. A client chooses the names: what is kept, looked
at and logged of them is bounded, by time, so that a client that makes up names silences nobody for long. Names close to a known
one, which are likely to be mistakes, have an allowance of their own.
"""

import difflib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Set

import msgspec

logger = logging.getLogger("quire.http")

_MAX_KEPT = 1000  # names; the longest not seen goes first
_MAX_LOOKED_AT = 8  # new names of one body
_MAX_NAME_CHARS = 64
_MAX_LINES = 50  # at once, of each kind
_LINE_S = 30.0  # so long for another one

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnknownFields:
    """The names said so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._said: OrderedDict[str, None] = OrderedDict()
        self._near, self._far = _Allowance(clock), _Allowance(clock)

    def look_at(self, data: bytearray, known: Set[str]) -> None:
        """data: a JSON object with other fields than the known ones. Values are not decoded but skipped: some ms for 8 MiB."""
        if self._near.is_empty and self._far.is_empty:
            return
        new = 0
        for name in _decoder.decode(data):
            if name in known:
                continue
            name = name[:_MAX_NAME_CHARS]
            if name in self._said:
                self._said.move_to_end(name)
                continue
            self._say(name, known)
            if (new := new + 1) == _MAX_LOOKED_AT:
                return

    def _say(self, name: str, known: Set[str]) -> None:
        meant = closest_name(name, known)
        if not (self._near if meant else self._far).take():
            return
        self._said[name] = None
        if len(self._said) > _MAX_KEPT:
            self._said.popitem(last=False)
        hint = f"; did you mean {meant!r}?" if meant else ""
        logger.warning("ignored: a request's field %r is not known here (said once for each name)%s", name, hint)


class _Allowance:
    """Lines that may be logged: _MAX_LINES, and one more every _LINE_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left, self._since = float(_MAX_LINES), clock()

    @property
    def is_empty(self) -> bool:
        now = self._clock()
        self._left = min(_MAX_LINES, self._left + (now - self._since) / _LINE_S)
        self._since = now
        return self._left < 1.0

    def take(self) -> bool:
        if self.is_empty:
            return False
        self._left -= 1.0
        return True


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is meant, most likely. Some 0.1 ms for 100 of them."""
    likely = [k for k in known if abs(len(k) - len(name)) <= 3]
    return next(iter(difflib.get_close_matches(name, likely, n=1, cutoff=0.75)), None)
