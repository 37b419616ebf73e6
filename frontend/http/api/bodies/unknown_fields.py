"""Unknown fields of bodies: each name is logged once, so that a misspelt one can be found.

They are ignored otherwise, because OpenAI's clients send new ones now and then. Clients choose the names, so the names kept,
compared and logged are bounded. The bound on log lines recovers with time: a client that makes up names does not suppress the
names of others for long. Names close to a known one, which are likely mistakes, have a bound of their own.
"""

import difflib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Set

import msgspec

logger = logging.getLogger("quire.http")

_MAX_KEPT = 1000  # names; the least recently seen is dropped first
_MAX_LOOKED_AT = 8  # new names of one body
_MAX_NAME_CHARS = 64
_MAX_LINES = 50  # at once, for each of the two kinds of names
_LINE_S = 30.0  # until another line is allowed

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnknownFields:
    """The names that were logged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._said: OrderedDict[str, None] = OrderedDict()
        self._near, self._far = _Allowance(clock), _Allowance(clock)

    def look_at(self, data: bytearray, known: Set[str]) -> None:
        """Log unknown names. data: a JSON object; its values are skipped without decoding, in some ms for 8 MiB."""
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
    """A bound on log lines: _MAX_LINES, and one more every _LINE_S."""

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
    """The most similar known name; None if none is close. Takes some 0.1 ms for 100 known names."""
    likely = [k for k in known if abs(len(k) - len(name)) <= 3]
    return next(iter(difflib.get_close_matches(name, likely, n=1, cutoff=0.75)), None)
