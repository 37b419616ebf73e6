"""Server-sent events of the two generating routes, from pre-encoded bytes.

Everything about a chunk but its text is known when the stream begins, so it is encoded once for each choice; a token costs one
JSON escape and two concatenations. Chunks with logprobs, token ids or usage take a second path, with the same result where
those are left out. One `ChunkWriter` a response; it knows bytes only, not the connection and not the engine.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from quire.frontend.http.api.bodies.schemas import ChatLogprobs, CompletionLogprobs, Usage
from quire.frontend.http.protocol.errors import ApiError

DONE = b"data: [DONE]\n\n"

json_bytes = msgspec.json.Encoder().encode


def error_event(error: ApiError) -> bytes:
    """A failure after the status line: the stream's last event."""
    return error.event + b"data: " + error.body() + b"\n\n"


class ChunkWriter:
    """Chunks of one response. num_choices: prompts times n. null_usage: every chunk says "usage": null (OpenAI's
    include_usage). Each method returns one whole event."""

    def __init__(
        self,
        kind: Literal["chat", "completion"],
        *,
        id: str,
        created: int,
        model: str,
        num_choices: int,
        null_usage: bool = False,
    ) -> None:
        chat = kind == "chat"
        name = b"chat.completion.chunk" if chat else b"text_completion"
        names = json_bytes(id), name, created, json_bytes(model)
        self._head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,' % names
        opening = b'"delta":{' if chat else b""
        field = b'"content":' if chat else b'"text":'
        self._openings = [self._head + b'"choices":[{"index":%d,' % i + opening for i in range(num_choices)]
        self._texts = [before + field for before in self._openings]
        self._close_delta = b"}" if chat else b""
        self._finish_delta = b"}" if chat else b'"text":""'
        self._no_usage = b',"usage":null' if null_usage else b""
        self._after_text = self._close_delta + b',"logprobs":null,"finish_reason":null}]' + self._no_usage + b"}\n\n"

    def text(self, index: int, text: str) -> bytes:
        return self._texts[index] + json_bytes(text) + self._after_text

    def rich_text(
        self,
        index: int,
        text: str,
        *,
        logprobs: ChatLogprobs | CompletionLogprobs | None = None,
        token_ids: list[int] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        return self._texts[index] + json_bytes(text) + self._close_delta + self._tail(logprobs, token_ids, usage)

    def prompt_pieces(
        self,
        index: int,
        text: str,
        *,
        logprobs: Iterable[bytes] | None,
        prompt_token_ids: Iterable[bytes] | None,
        usage: Usage | None,
    ) -> Iterator[bytes]:
        """rich_text of a prompt, which may be long: logprobs and ids are JSON in pieces."""
        yield self._texts[index] + json_bytes(text) + self._close_delta + b',"logprobs":'
        yield from (b"null",) if logprobs is None else logprobs
        yield b',"finish_reason":null'
        if prompt_token_ids is not None:
            yield b',"token_ids":[],"prompt_token_ids":'
            yield from prompt_token_ids
        yield b"}]%b}\n\n" % self._usage(usage)

    def delta(
        self,
        index: int,
        fields: bytes,
        *,
        logprobs: ChatLogprobs | None = None,
        token_ids: list[int] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """Of a chat choice whose output is parsed. fields: the delta, a JSON object."""
        return self._openings[index] + fields[1:] + self._tail(logprobs, token_ids, usage)

    def _tail(
        self, logprobs: ChatLogprobs | CompletionLogprobs | None, token_ids: list[int] | None, usage: Usage | None
    ) -> bytes:
        """What follows the text of a chunk that is not its choice's last."""
        ids = b"" if token_ids is None else b',"token_ids":' + json_bytes(token_ids)
        return b',"logprobs":%b,"finish_reason":null%b}]%b}\n\n' % (json_bytes(logprobs), ids, self._usage(usage))

    def role(
        self,
        index: int,
        role: str,
        *,
        prompt_token_ids: list[int] | None = None,
        prompt_text: str | None = None,
        usage: Usage | None = None,
        content: bytes = b'""',
    ) -> bytes:
        """A chat choice's first chunk."""
        ids = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + json_bytes(prompt_token_ids)
        ids += b"" if prompt_text is None else b',"prompt_text":' + json_bytes(prompt_text)
        delta = b'"role":%b,"content":%b},"logprobs":null,"finish_reason":null}]' % (json_bytes(role), content)
        return self._openings[index] + delta + ids + self._usage(usage) + b"}\n\n"

    def finish(
        self,
        index: int,
        finish_reason: str,
        stop_reason: int | str | None,
        usage: Usage | None = None,
        token_ids: bool = False,
    ) -> bytes:
        """A choice's last chunk. token_ids: it has this field, too, for clients that add up every chunk's."""
        ids = b',"token_ids":[]' if token_ids else b""
        reason = json_bytes(finish_reason), json_bytes(stop_reason), ids, self._usage(usage)
        tail = b',"logprobs":null,"finish_reason":%b,"stop_reason":%b%b}]%b}\n\n' % reason
        return self._openings[index] + self._finish_delta + tail

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'"choices":[],"usage":' + json_bytes(usage) + b"}\n\n"

    def _usage(self, usage: Usage | None) -> bytes:
        return self._no_usage if usage is None else b',"usage":' + json_bytes(usage)
