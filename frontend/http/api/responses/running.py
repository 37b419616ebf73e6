"""Running a turn of /v1/responses to its end: as one answer, or as a stream of events; the same items either way.

A stream's head goes out with its first output, so that what fails before that has a status of its own; what fails later is told
by response.failed, or by `error` where the server itself breaks off.
"""

import asyncio
from collections.abc import AsyncIterator

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import Stream
from quire.frontend.http.api.bodies.json_pieces import too_large, write_pieces
from quire.frontend.http.api.bodies.logprobs import LogprobStyle
from quire.frontend.http.api.chat_output import ChatOutput
from quire.frontend.http.api.generate import collect, follow, most_logprobs
from quire.frontend.http.api.metrics.request_metrics import count_first_token
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
    """A turn whose prompt was submitted. stream: where its events go; None for an answer in one piece."""

    def __init__(self, services: Services, turn: Turn, run: PromptRun, stream: Response | None = None) -> None:
        self._services = services
        self._turn = turn
        self._run = run
        self._stream = stream
        self._parsed = None if turn.chat.plan is None else ChatOutput(turn.chat.plan)
        self._tokens = self._tokens_of_text() if turn.body.wants_logprobs else None
        self._writer = EventWriter(in_pieces=self._tokens is not None) if stream is not None else None
        self._output = Output(turn.response, self._writer, self._tokens, turn.seals)

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
        """Complete the turn's response."""
        if self._tokens is None:
            ((delta,),) = await collect([self._run], self._services.metrics)
            events = await self._parsed.all_events(self._run, delta) if self._parsed is not None else _plain(delta)
            self._output.add(map(self._shown, events), delta)
        else:
            most = most_logprobs(self._services.max_response_bytes, self._turn.body.top_logprobs or 0)
            async for deltas in self._deltas():
                self._add(deltas)
                if self._run.num_tokens[0] > most:
                    raise too_large(self._services.max_response_bytes)
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
        """End the response with what went wrong."""
        self._turn.response.fail(error)
        self._output.end()
        self._output.tell_end()

    # ------------------------------------------------------------------------------------------------------- streaming
    async def events(self) -> None:
        """Send all events, to the last."""
        assert self._stream is not None
        self._output.begin()
        try:
            async for deltas in self._deltas():
                self._add(deltas)
                await self._send()
                if self._tokens is None and isinstance(self._run.stream, Stream):
                    await follow(self._run.stream, self._stream, self._read)
            await self._end()
            await self._send()
            self._stream.end()
        except BaseException as error:  # told to the client, and passed on
            self._tell(error)
            raise

    async def _send(self) -> None:
        assert self._stream is not None and self._writer is not None
        stream = self._stream
        if self._tokens is not None:
            if stream.state is ResponseState.WAITING:
                stream.start()
            return await write_pieces(stream, self._writer.take_pieces())
        if stream.state is ResponseState.WAITING:
            stream.start(first=self._writer.take())
        else:
            stream.write(self._writer.take())
        if stream.write_paused:
            await stream.drain()

    def _tell(self, error: BaseException) -> None:
        stream, writer = self._stream, self._writer
        if stream is None or writer is None or stream.state is not ResponseState.STREAMING or stream.client_gone:
            return
        if isinstance(error, asyncio.CancelledError):
            self._output.tell_error(shutting_down())
        else:
            known = error_of(error) if isinstance(error, Exception) else None
            self.fail(known or internal_error())
        stream.end(writer.take())

    # --------------------------------------------------------------------------------------------------- what it yields
    async def _deltas(self) -> AsyncIterator[list[Delta]]:
        """What the engine yields, counted."""
        run, metrics = self._run, self._services.metrics
        assert isinstance(run.stream, AsyncIterator)
        async for deltas in run.stream:
            count_first_token(metrics, run)
            for delta in deltas:
                run.num_tokens[0] = delta.num_tokens
                if delta.finish_reason is not None:
                    run.finish_reasons[0] = delta.finish_reason
                    metrics.count("request_success", delta.finish_reason)
            yield deltas

    def _read(self, delta: Delta) -> bytes:
        """The events of a delta that does not end the stream."""
        assert self._writer is not None
        self._run.num_tokens[0] = delta.num_tokens
        self._add([delta])
        return self._writer.take()

    def _add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if self._parsed is None:
                self._output.add(_plain(delta), delta)
            else:
                self._output.add(map(self._shown, self._parsed.events(self._run, delta)), delta)

    def _shown(self, event: Event) -> Event:
        """A call beyond those that the answer may hold is shown to nobody."""
        is_call = isinstance(event, CallBegun | Arguments)
        if is_call and self._parsed is not None and not self._parsed.is_wanted(event.index):  # type: ignore[union-attr]
            return Markup(source_of(event))
        return event


def _plain(delta: Delta) -> list[Event]:
    return [Content(delta.text)] if delta.text else []
