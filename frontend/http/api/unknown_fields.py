"""Body fields that mean nothing here: each name is said once in the log, so that a misspelt one can be found.

They are ignored all the same, as OpenAI's clients send new ones now and then. A client chooses the names: what is kept and
logged of them is bounded.
"""

import logging

import msgspec

logger = logging.getLogger("quire.http")

_MAX_NAMES = 100
_MAX_NAME_CHARS = 64
# Of OpenAI's and vLLM's APIs, and nothing to do with the answer.
_HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
     "safety_identifier", "verbosity", "request_id")
)  # fmt: skip

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnknownFields:
    """The names said so far."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def look_at(self, data: bytearray, body: msgspec.Struct) -> None:
        """data: the JSON that was decoded as `body`. Values are not decoded again but skipped: some ms for 8 MiB."""
        for name in _decoder.decode(data).keys() - _HARMLESS.union(body.__struct_fields__):
            name = name[:_MAX_NAME_CHARS]
            if name not in self._said and len(self._said) < _MAX_NAMES:
                self._said.add(name)
                logger.warning("ignored: a request's field %r is not known here (said once for each name)", name)
