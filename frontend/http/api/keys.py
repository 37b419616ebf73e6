"""ApiKeys: the keys that are accepted. Only this file knows which headers bring a request's key.

OpenAI's clients send `Authorization: Bearer KEY`, Anthropic's `x-api-key: KEY`. Every route takes either; of two, one must be
right. An admin key opens every route, and the admin routes, where there is one, open to nothing else (access.py).
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from quire.frontend.http.limits.key_limits import KeyLimits


class ApiKeys:
    """keys, admin_keys: a request needs one of both, if there are keys. limits: may make more of them an admin's."""

    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = (), limits: KeyLimits | None = None) -> None:
        ordinary, self._admin = _digests(keys), _digests(admin_keys)
        self._digests = [*ordinary, *self._admin]
        self.are_needed = bool(ordinary)
        self._limits = limits or KeyLimits()
        self.have_admin = bool(self._admin) or self._limits.have_admin

    def owner(self, headers: Mapping[bytes, bytes]) -> str | None:
        """A digest of the request's key; None if it has none that is right. It is compared with every key in constant time, so
        timing reveals neither a near miss nor a key's place in the list."""
        if not self._digests:
            return None
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        ways = (headers.get(b"x-api-key", b""), b"x-api-key" in headers), (bearer, scheme.lower() == b"bearer")
        owner = None
        for given, counts in ways:
            digest = hashlib.sha256(given.strip()).digest()
            if _has(self._digests, digest) and counts:
                owner = digest.hex()
        return owner

    def is_admin(self, owner: str) -> bool:
        """Whether this is the digest of an admin key."""
        return bool(owner) and (_has(self._admin, bytes.fromhex(owner)) or self._limits.access(owner).admin)


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _has(digests: list[bytes], digest: bytes) -> bool:
    found = False
    for other in digests:
        found |= hmac.compare_digest(digest, other)
    return found
