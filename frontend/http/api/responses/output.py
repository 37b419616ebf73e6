"""Output: a model's output as the items of a response, and, for a stream, as the events of OpenAI's reference.

It reads the parsers' events (text/output_events.py). One item is open at a time; it is closed when the next one begins. This
file knows no connection: running.py sends the bytes that `EventWriter.take` returns.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.bodies.json_pieces import pieces
from quire.frontend.http.api.responses.answer import (
    CustomToolCallItem,
    FunctionCallItem,
    Item,
    ItemStatus,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
)
from quire.frontend.http.api.responses.items import item_id
from quire.frontend.http.api.responses.text_logprobs import TokenRow, TokensOfText
from quire.frontend.http.api.responses.tools import ChatTools
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.output_events import Arguments, CallBegun, Content, Event, Reasoning, source_of

UNSET = msgspec.UNSET


class StreamEvent(msgspec.Struct, kw_only=True):
    """An event of any type; the type determines its fields."""

    type: str
    sequence_number: int
    response: ResponseObject | msgspec.UnsetType = UNSET
    item_id: str | msgspec.UnsetType = UNSET
    output_index: int | msgspec.UnsetType = UNSET
    content_index: int | msgspec.UnsetType = UNSET
    item: Any = UNSET
    part: Any = UNSET
    text: str | msgspec.UnsetType = UNSET
    arguments: str | msgspec.UnsetType = UNSET
    input: str | msgspec.UnsetType = UNSET
    name: str | msgspec.UnsetType = UNSET
    logprobs: Any = UNSET
    code: str | msgspec.UnsetType | None = UNSET
    message: str | msgspec.UnsetType = UNSET
    param: str | msgspec.UnsetType | None = UNSET


class EventWriter:
    """Encodes events, numbered from 0. in_pieces: some may be large, and are encoded while they are sent."""

    def __init__(self, in_pieces: bool) -> None:
        self._in_pieces = in_pieces
        self._number = 0
        self._ready: list[bytes | Iterator[bytes]] = []
        self._before = self._behind = b""  # bytes around the number and the text of the open item's deltas

    def take(self) -> bytes:
        """The events since the last call."""
        ready, self._ready = self._ready, []
        return b"".join([event if isinstance(event, bytes) else b"".join(event) for event in ready])

    def take_pieces(self) -> Iterator[bytes]:
        """As `take`, in pieces that are encoded when they are asked for."""
        ready, self._ready = self._ready, []
        for event in ready:
            yield from (event,) if isinstance(event, bytes) else event

    def add(self, kind: str, **fields: Any) -> None:
        event = StreamEvent(type=f"response.{kind}" if kind != "error" else kind, sequence_number=self._number, **fields)
        self._number += 1
        head = b"event: %b\ndata: " % event.type.encode()
        if self._in_pieces and kind.endswith((".done", "completed", "incomplete", "failed")):
            self._ready.append(_framed(head, event))
        else:
            self._ready.append(head + json_bytes(event) + b"\n\n")

    def begin_deltas(self, kind: str, item_id: str, output_index: int, has_parts: bool) -> None:
        """Prepare for deltas of this kind, all of one item."""
        name, part = f"response.{kind}.delta".encode(), b',"content_index":0' if has_parts else b""
        self._before = b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name)
        self._behind = b',"item_id":%b,"output_index":%d%b,"delta":' % (json_bytes(item_id), output_index, part)

    def delta(self, text: str, end: bytes = b"") -> None:
        number, self._number = self._number, self._number + 1
        self._ready.append(b"%b%d%b%b%b}\n\n" % (self._before, number, self._behind, json_bytes(text), end))


def _framed(head: bytes, event: StreamEvent) -> Iterator[bytes]:
    yield head
    yield from pieces(event)
    yield b"\n\n"


class Output:
    """One response's output. writer: None if nothing is streamed. tokens: None if no log-probabilities are wanted.
    seals: whether reasoning items have encrypted_content. tools: what its client calls the tools."""

    def __init__(
        self,
        response: ResponseObject,
        writer: EventWriter | None,
        tokens: TokensOfText | None = None,
        seals: bool = False,
        tools: ChatTools | None = None,
    ) -> None:
        self._response = response
        self._writer = writer
        self._tokens = tokens
        self._seals = seals
        self._tools = tools or ChatTools()
        # the open item
        self._item: Item | None = None
        self._texts: list[str] = []
        self._rows: list[TokenRow] = []

    def begin(self) -> None:
        if self._writer is not None:
            self._writer.add("created", response=self._response)
            self._writer.add("in_progress", response=self._response)

    def add(self, events: Iterable[Event], delta: Delta) -> None:
        """Add a delta's events."""
        if self._tokens is not None:
            self._tokens.add(delta)
        for event in events:
            rows = [] if self._tokens is None else self._tokens.take(source_of(event))
            match event:
                case Content():
                    self._say(event.text, rows)
                case Reasoning():
                    self._reason(event.text)
                case CallBegun():
                    self._call(event)
                case Arguments():
                    self._grow(event.text)

    # ------------------------------------------------------------------------------------------------------ the items
    def _say(self, text: str, rows: Sequence[TokenRow]) -> None:
        if not isinstance(self._item, OutputMessage):
            self._open(OutputMessage(id=self._new_id("message")), OutputText(), "output_text")
        self._texts.append(text)
        self._rows += rows
        if self._writer is not None and text:
            logprobs = b"[]" if self._tokens is None else json_bytes(self._tokens.logprobs(rows))
            self._writer.delta(text, b',"logprobs":' + logprobs)

    def _reason(self, text: str) -> None:
        if not isinstance(self._item, ReasoningItem):
            self._open(ReasoningItem(id=self._new_id("reasoning")), ReasoningText(), "reasoning_text")
        self._grow(text)

    def _call(self, event: CallBegun) -> None:
        tool = self._tools.name_of(event.name)
        names: dict[str, Any] = {"name": tool.name, "namespace": UNSET if tool.namespace is None else tool.namespace}
        if event.kind == "custom":
            custom = CustomToolCallItem(id=self._new_id("custom_tool_call"), call_id=event.id, **names)
            return self._open(custom, None, "custom_tool_call_input")
        item = FunctionCallItem(id=self._new_id("function_call"), call_id=event.id, **names)
        self._open(item, None, "function_call_arguments")

    def _grow(self, text: str) -> None:
        self._texts.append(text)
        if self._writer is not None and text:
            self._writer.delta(text)

    def _new_id(self, kind: str) -> str:
        return item_id(self._response.id, kind, len(self._response.output) + (self._item is not None))

    def _open(self, item: Item, part: OutputText | ReasoningText | None, deltas: str) -> None:
        self._close("completed")
        index = len(self._response.output)
        self._item, self._texts, self._rows = item, [], []
        if self._writer is not None:
            self._writer.add("output_item.added", output_index=index, item=item)
            if part is not None:
                self._writer.add("content_part.added", item_id=item.id, output_index=index, content_index=0, part=part)
            self._writer.begin_deltas(deltas, item.id, index, part is not None)

    def _close(self, status: ItemStatus) -> None:
        item, index = self._item, len(self._response.output)
        if item is None:
            return
        text, item.status, where = "".join(self._texts), status, {"item_id": item.id, "output_index": index}
        match item:
            case FunctionCallItem():
                item.arguments = text
                self._done("function_call_arguments", where, arguments=text, name=item.name)
            case CustomToolCallItem():
                item.input = text
                self._done("custom_tool_call_input", where, input=text)
            case ReasoningItem():
                item.content = [ReasoningText(text=text)]
                if self._seals:
                    item.seal()
                self._done("reasoning_text", where, item.content[0], text=text)
            case OutputMessage():
                logprobs: Any = [] if self._tokens is None else self._tokens.logprob_pieces(self._rows)
                item.content = [OutputText(text=text, logprobs=logprobs)]
                self._done("output_text", where, item.content[0], text=text, logprobs=logprobs)
        if self._writer is not None:
            self._writer.add("output_item.done", output_index=index, item=item)
        self._response.output.append(item)
        self._item = None

    def _done(self, kind: str, where: dict[str, Any], part: OutputText | ReasoningText | None = None, **fields: Any) -> None:
        if self._writer is None:
            return
        if part is None:
            return self._writer.add(f"{kind}.done", **where, **fields)
        self._writer.add(f"{kind}.done", **where, content_index=0, **fields)
        self._writer.add("content_part.done", **where, content_index=0, part=part)

    # -------------------------------------------------------------------------------------------------------- the end
    def end(self) -> None:
        """Close the open item; the response has its status already. An empty output becomes an empty message."""
        whole = self._response.status == "completed"
        if self._item is None and not self._response.output and whole:
            self._say("", [])
        self._close("completed" if whole else "incomplete")

    def tell_end(self) -> None:
        """Write the last event, with the finished response."""
        if self._writer is not None:
            status = self._response.status
            self._writer.add(status if status in ("completed", "failed") else "incomplete", response=self._response)

    def tell_error(self, error: ApiError) -> None:
        """Write the last event of a stream that the server breaks off."""
        if self._writer is not None:
            self._writer.add("error", code=error.code, message=error.message, param=error.param)
