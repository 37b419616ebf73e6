"""Mistral: `[TOOL_CALLS]` and a list of calls, or (from tokenizer v11) `[TOOL_CALLS]name{...}`, with `[CALL_ID]id` and
`[ARGS]`.

Its chat templates need ids of nine letters and digits.
"""

import re
import secrets
import string

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.json_values import json_arguments, json_calls
from quire.frontend.text.tool_parsers.reader import MAX_NAME, Malformed, Markers, Reader, Waits

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ALPHABET = string.ascii_letters + string.digits
_NAME = re.compile(r"[\w.-]*", re.ASCII)


def mistral_call_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class Mistral(ToolParser):
    starts = Markers(START)
    special = (START, CALL_ID, ARGS)
    new_id = staticmethod(mistral_call_id)

    def _call(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(START)
        if (yield from reader.skip_space()) in ("[", "{"):
            yield from json_calls(reader)
        else:
            yield from self._named(reader)
        reader.close()

    def _named(self, reader: Reader) -> Waits[None]:
        name = yield from self._word(reader)
        call_id = None
        if (yield from reader.looks_like(CALL_ID)):
            yield from reader.expect(CALL_ID)
            call_id = yield from self._word(reader)
        if (yield from reader.looks_like(ARGS)):
            yield from reader.expect(ARGS)
        yield from reader.skip_space()
        yield from json_arguments(reader, name, call_id)

    def _word(self, reader: Reader) -> Waits[str]:
        word = yield from reader.look(_NAME, MAX_NAME)
        if not word:
            raise Malformed
        return reader.take(len(word))
