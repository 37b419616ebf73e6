"""ApiKeys: the keys that are accepted. Only this file knows which headers bring a request's key.

OpenAI's clients send `Authorization: Bearer KEY`, Anthropic's `x-api-key: KEY`. Every route takes either; of two, one must be
right.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping


class ApiKeys:
    """keys: if empty, no key is needed."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, headers: Mapping[bytes, bytes]) -> str | None:
        """A digest of the request's key; None if it has none that is right. It is compared with every key in constant time, so
        timing reveals neither a near miss nor a key's place in the list."""
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
