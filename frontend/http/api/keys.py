"""ApiKeys: the keys that let requests in. The one place that knows where a request has its own.

`Authorization: Bearer KEY` is how OpenAI's clients send it, `x-api-key: KEY` how Anthropic's do; either is taken on every
route, and who sends both needs one that is right.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping


class ApiKeys:
    """keys: none means open to all."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, headers: Mapping[bytes, bytes]) -> str | None:
        """A digest of the right key that a request has brought; None if there is none. Compares with every key, in constant
        time, so that neither a near miss nor its place in the list shows."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        ways = (headers.get(b"x-api-key", b""), b"x-api-key" in headers), (bearer, scheme.lower() == b"bearer")
        owner = None
        for given, counts in ways:
            digest = hashlib.sha256(given.strip()).digest()
            found = False
            for other in self._digests:
                found |= hmac.compare_digest(digest, other)
            if found and counts:
                owner = digest.hex()
        return owner
