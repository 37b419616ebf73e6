"""Hints about what to write instead of a name that an object of Python's users does not have.

They are for options, fields and attributes.
"""

import difflib
from collections.abc import Iterable, Mapping


class NoSuchName(NotImplementedError, AttributeError):
    """A missing attribute, with what to write instead. It is an AttributeError, so that hasattr, copy and pickle work."""


def what_to_write(name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """The end of a sentence about an unknown name: that of `elsewhere`, else the nearest known names, else all of them."""
    if elsewhere and name in elsewhere:
        return elsewhere[name]
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.7)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
