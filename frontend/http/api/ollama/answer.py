"""Answer: one request's output as Ollama's JSON, in one piece or as the lines of a stream (generate.StreamedAnswer).

generate.py's pump sends the lines. A call is sent whole, when the next one begins or the output ends. Durations are in
nanoseconds and at least 1, since clients divide by them.
"""

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.chat_output import ChatOutput
from quire.frontend.http.api.messages.blocks import input_of
from quire.frontend.http.api.ollama.schemas import (
    OllamaChatResponse,
    OllamaGenerateResponse,
    OutputCall,
    OutputFunction,
    OutputMessage,
)
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.text.output_events import Arguments, CallBegun, Content, Event, Reasoning


class Answer:
    """is_chat: answer as /api/chat does, else as /api/generate. began: when the request came, in seconds since 1970.

    output: None if the output is plain text. shows_thinking: whether the answer has the reasoning.
    """

    def __init__(self, model: str, is_chat: bool, began: float, output: ChatOutput | None, shows_thinking: bool = True) -> None:
        self._model = model
        self._is_chat = is_chat
        self._began = began
        self._output = output
        self._shows_thinking = shows_thinking
        self._num_calls = 0
        self._call: CallBegun | None = None  # the call that arguments come for
        self._arguments: list[str] = []

    # ------------------------------------------------------------------------------------------------------- streaming
    def opening(self, run: PromptRun) -> bytes:
        return b""

    def events(self, run: PromptRun, delta: Delta) -> bytes:
        """A line with what a delta adds, and, if it is the last, the line that ends the stream."""
        events = self._output.events(run, delta) if self._output is not None else [Content(delta.text)]
        message = self._message(events, delta.finish_reason is not None)
        has_more = message.content or message.thinking or message.tool_calls
        line = json_bytes(self._answer(message)) + b"\n" if has_more else b""
        return line if delta.finish_reason is None else line + json_bytes(self._end(OutputMessage(), run, delta)) + b"\n"

    def writer(self, run: PromptRun) -> Callable[[Delta], bytes]:
        return lambda delta: self.events(run, delta)

    async def closing(self) -> bytes:
        return b""

    # ---------------------------------------------------------------------------------------------------- in one piece
    async def whole(self, run: PromptRun, delta: Delta) -> OllamaChatResponse | OllamaGenerateResponse:
        events = await self._output.all_events(run, delta) if self._output is not None else [Content(delta.text)]
        return self._end(self._message(events, True), run, delta)

    def empty(self, reason: str) -> OllamaChatResponse | OllamaGenerateResponse:
        """The answer to a request without a prompt, which asks Ollama to load the model, or to unload it."""
        return self._answer(OutputMessage(), done=True, done_reason=reason)

    # ------------------------------------------------------------------------------------------------------------ both
    def _message(self, events: Iterable[Event], is_last: bool) -> OutputMessage:
        texts: dict[type[Event], list[str]] = {Content: [], Reasoning: []}
        calls: list[OutputCall] = []
        for event in events:
            match event:
                case Content() | Reasoning():
                    texts[type(event)].append(event.text)
                case CallBegun() if self._is_wanted(event.index):
                    calls += self._ended_call()
                    self._call = event
                case Arguments() if self._is_wanted(event.index):
                    self._arguments.append(event.text)
        if is_last:
            calls += self._ended_call()
        thinking = "".join(texts[Reasoning]) if self._shows_thinking else ""
        return OutputMessage(
            content="".join(texts[Content]), thinking=thinking or msgspec.UNSET, tool_calls=calls or msgspec.UNSET
        )

    def _is_wanted(self, call: int) -> bool:
        return self._output is not None and self._output.is_wanted(call)

    def _ended_call(self) -> list[OutputCall]:
        call, text, self._call, self._arguments = self._call, "".join(self._arguments), None, []
        if call is None:
            return []
        arguments = json_bytes({"input": text}) if call.kind == "custom" else input_of(text).encode()
        self._num_calls += 1
        return [OutputCall(call.id, OutputFunction(self._num_calls - 1, call.name, msgspec.Raw(arguments)))]

    def _end(self, message: OutputMessage, run: PromptRun, delta: Delta) -> OllamaChatResponse | OllamaGenerateResponse:
        now, times = time.time(), run.stream.metrics
        first = times.first_token_time or now
        return self._answer(
            message,
            done=True,
            done_reason="length" if delta.finish_reason == "length" else "stop",
            total_duration=_nanoseconds(now - self._began),
            load_duration=0,  # the model was loaded before
            prompt_eval_count=run.stream.num_prompt_tokens,
            prompt_eval_duration=_nanoseconds(first - times.arrival_time - (times.queue_s or 0.0)),
            eval_count=sum(run.num_tokens),
            eval_duration=_nanoseconds(now - first),
        )

    def _answer(self, message: OutputMessage, **fields: Any) -> OllamaChatResponse | OllamaGenerateResponse:
        head = {"model": self._model, "created_at": moment(time.time()), "done": False, **fields}
        if self._is_chat:
            return OllamaChatResponse(message=message, **head)
        return OllamaGenerateResponse(response=message.content, thinking=message.thinking, **head)


def moment(time_s: float) -> str:
    """Seconds since 1970 as RFC 3339 writes them."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(duration_s: float) -> int:
    return max(1, int(duration_s * 1e9))  # negative if the clock was set back
