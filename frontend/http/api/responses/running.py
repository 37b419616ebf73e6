"""Run a turn of /v1/responses to its end, as one answer or as a stream of events, with the same items.

A stream's head goes out with its first output, so an earlier failure has a status of its own. A later failure is the event
response.failed, or `error` if the server itself breaks the stream off.
"""

import asyncio
from collections.abc import Callable, Iterator

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.bodies.json_pieces import too_large
from quire.frontend.http.api.bodies.logprobs import LogprobStyle
from quire.frontend.http.api.chat_output import ChatOutput
from quire.frontend.http.api.generate import Pump, collect, most_logprobs
from quire.frontend.http.api.prompt_run import PromptRun, usage_of
from quire.frontend.http.api.responses.answer import usage_of_response
from quire.frontend.http.api.responses.output import EventWriter, Output
from quire.frontend.http.api.responses.records import keep, keep_result
from quire.frontend.http.api.responses.text_logprobs import TokensOfText
from quire.frontend.http.api.responses.translate import error_of
from quire.frontend.http.api.responses.turn import Turn
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.errors import ApiError, internal_error, shutting_down
from quire.frontend.http.protocol.exchange import Response, ResponseState
from quire.frontend.text.output_events import Arguments, CallBegun, Content, Event, Markup, source_of


class RunningTurn:
    """A submitted turn (generate.StreamedAnswer). stream: the response for its events; None for an answer in one piece."""

    def __init__(self, services: Services, turn: Turn, run: PromptRun, stream: Response | None = None) -> None:
        self._services = services
        self._turn = turn
        self._run = run
        self._stream = stream
        self._parsed = None if turn.chat.plan is None else ChatOutput(turn.chat.plan)
        self._tokens = self._tokens_of_text() if turn.body.wants_logprobs else None
        self._writer = EventWriter(in_pieces=self._tokens is not None) if stream is not None else None
        self._output = Output(turn.response, self._writer, self._tokens, turn.seals, turn.tools)
        self._most_tokens = most_logprobs(services.max_response_bytes, turn.body.top_logprobs or 0)

    def _tokens_of_text(self) -> TokensOfText:
        chat, tokenizer = self._turn.chat, self._services.client.tokenizer
        hidden = tokenizer.special_ids if chat.params.skip_special_tokens else frozenset[int]()
        if chat.plan is not None:
            hidden = hidden - chat.plan.marker_ids
        turn = self._turn
        style = LogprobStyle(tokenizer, turn.body.top_logprobs or 0, bool(turn.chat_body.return_tokens_as_token_ids))
        return TokensOfText(tokenizer, style, hidden)

    # --------------------------------------------------------------------------------------------------- in one piece
    async def whole(self) -> None:
        """Wait for the end, and complete the turn's response."""
        if self._tokens is None:
            ((delta,),) = await collect([self._run], self._services.metrics)
            events = await self._parsed.all_events(self._run, delta) if self._parsed is not None else _plain(delta)
            self._output.add(map(self._shown, events), delta)
        else:
            await Pump(None, [self._run], self._services.metrics, self).read(self._run)
        await self._end()

    async def _end(self) -> None:
        response = self._turn.response
        response.end(self._run.finish_reasons[0])
        response.usage = usage_of_response(usage_of([self._run]))
        self._output.end()
        turn, storage = self._turn, self._services.storage
        if turn.body.keeps:
            await (keep_result if response.background else keep)(storage, turn.owner, response, turn.items)
        self._output.tell_end()

    def fail(self, error: ApiError) -> None:
        """End the response with an error."""
        self._turn.response.fail(error)
        self._output.end()
        self._output.tell_end()

    # ------------------------------------------------------------------------------------------------------- streaming
    async def send_events(self) -> None:
        """Send all events, and end the stream."""
        assert self._stream is not None
        try:
            await Pump(self._stream, [self._run], self._services.metrics, self).run()
        except BaseException as error:  # sent to the client, and raised again
            self._tell(error)
            raise

    def opening(self, run: PromptRun) -> bytes:
        self._output.begin()
        return b""

    def events(self, run: PromptRun, delta: Delta) -> bytes | Iterator[bytes]:
        self._add(delta)
        return self._take()

    def writer(self, run: PromptRun) -> Callable[[Delta], bytes] | None:
        return self._read if self._tokens is None else None

    async def closing(self) -> bytes | Iterator[bytes]:
        await self._end()
        return self._take()

    def _take(self) -> bytes | Iterator[bytes]:
        """The events that are not sent yet; in pieces with log-probabilities, which may make them large."""
        if self._writer is None:
            return b""
        return self._writer.take() if self._tokens is None else self._writer.take_pieces()

    def _tell(self, error: BaseException) -> None:
        stream, writer = self._stream, self._writer
        if stream is None or writer is None or stream.state is not ResponseState.STREAMING or stream.client_gone:
            return
        if isinstance(error, asyncio.CancelledError):
            self._output.tell_error(shutting_down())
        else:
            self.fail(error_of(error, self._turn.tools) or internal_error())
        stream.end(writer.take())

    # --------------------------------------------------------------------------------------------------- what it yields
    def _read(self, delta: Delta) -> bytes:
        """The events of a delta without a finish_reason."""
        assert self._writer is not None
        self._add(delta)
        return self._writer.take()

    def _add(self, delta: Delta) -> None:
        if self._parsed is None:
            self._output.add(_plain(delta), delta)
        else:
            self._output.add(map(self._shown, self._parsed.events(self._run, delta)), delta)
        if self._writer is None and self._run.num_tokens[0] > self._most_tokens:
            raise too_large(self._services.max_response_bytes)

    def _shown(self, event: Event) -> Event:
        """The event as the answer shows it: a call beyond max_calls becomes markup, which is not shown."""
        is_call = isinstance(event, CallBegun | Arguments)
        if is_call and self._parsed is not None and not self._parsed.is_wanted(event.index):  # type: ignore[union-attr]
            return Markup(source_of(event))
        return event


def _plain(delta: Delta) -> list[Event]:
    return [Content(delta.text)] if delta.text else []
