"""POST /v1/chat/completions. chat_run.py prepares and submits the prompt; chat_output.py parses the output."""

import time
from collections.abc import Iterable, Iterator

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.json_pieces import LARGE_ANSWER, send_json
from quire.frontend.http.api.bodies.logprobs import LogprobStyle, chat_logprobs, chat_pieces, prompt_logprobs
from quire.frontend.http.api.bodies.request_media import RequestMedia
from quire.frontend.http.api.bodies.schemas import (
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    Usage,
)
from quire.frontend.http.api.chat_output import ChatOutput
from quire.frontend.http.api.chat_run import check_chat, prepare_chat, submit_chat
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.generate import Pump, collect, running
from quire.frontend.http.api.logs.request_log import new_id
from quire.frontend.http.api.metrics.draft_metrics import draft_metrics
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.prompt_run import PromptRun, usage_of
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import ChunkEvents, ChunkWriter, includes_usage, json_bytes
from quire.frontend.http.api.terms import terms_of
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.sampling import ALL_LOGPROBS

_decoder = BodyDecoder(ChatRequest)


async def chat_completions(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    services.defaults.fill(body)
    client, metrics = services.client, services.metrics
    model = await check_model(services, request, body.model)
    tokenizer = client.tokenizer
    checked = check_chat(body, tokenizer, _num_logprobs(body, client.welcome.limits.max_logprobs))
    checked.terms = terms_of(services, request, body.timeout, body.priority)
    chat = await prepare_chat(services, body, checked, RequestMedia(services, request))
    told = client.welcome.drafts_told
    name, created, runs = new_id("chatcmpl", request.headers, body.request_id), int(time.time()), list[PromptRun]()
    async with running(name, runs, metrics, services.request_log):
        runs.append(submit_chat(services, body, chat, name))
        services.request_log.started(name, runs, bool(body.stream))
        parsed = None if chat.plan is None else ChatOutput(chat.plan, body.include_reasoning is not False)
        chat_format = ChatFormat(body, tokenizer, parsed, services.defaults.role(body), chat.text)
        if body.stream:
            chunks = ChunkWriter(
                "chat", id=name, created=created, model=model, num_choices=checked.n, null_usage=includes_usage(body)
            )
            return await Pump(response, runs, metrics, ChunkEvents(chunks, chat_format, runs, body, told)).run()
        (deltas,) = await collect(runs, metrics, services.max_response_bytes)
        answer = ChatResponse(
            id=name,
            created=created,
            model=model,
            choices=[await _choice(runs[0], delta, chat_format, bool(body.return_token_ids)) for delta in deltas],
            usage=usage_of(runs),
            prompt_logprobs=prompt_logprobs(runs[0].stream.prompt_logprobs),
            prompt_token_ids=chat.token_ids if body.return_token_ids else msgspec.UNSET,
            prompt_text=chat.text if body.return_prompt_text else msgspec.UNSET,
            metrics=draft_metrics(runs, told),
        )
    if chat_format.is_large(runs[0]):
        return await send_json(response, answer, services.max_response_bytes)
    response.send(200, json_bytes(answer))


class ChatFormat:
    """The parts of an answer that are chat's own: the role, the echoed text, log-probabilities as `content`."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, parsed: ChatOutput | None, role: str, prompt_text: str) -> None:
        self.parsed = parsed
        self.role = role
        self.echo = echoed_text(body)
        self._prompt_text = prompt_text if body.return_prompt_text else None
        self._first_content = b'""' if parsed is None else b"null"  # parsed output may have no content
        self.wants_logprobs = bool(body.logprobs)
        self._return_token_ids = bool(body.return_token_ids)
        self._style: LogprobStyle | None = None
        if self.wants_logprobs:
            self._style = LogprobStyle(tokenizer, body.top_logprobs or 0, bool(body.return_tokens_as_token_ids))

    def is_large(self, run: PromptRun) -> bool:
        """Whether an answer in one piece might take long to encode."""
        num_ids = sum(run.num_tokens) + (len(run.prompt_token_ids) if self._return_token_ids else 0)
        return self.wants_logprobs or run.params.prompt_logprobs is not None or num_ids > LARGE_ANSWER

    def opening(self, run: PromptRun, chunks: ChunkWriter, usage: Usage | None) -> Iterable[bytes]:
        if not self._return_token_ids and self._prompt_text is None and not self.echo:
            return [chunks.role(i, self.role, usage=usage, content=self._first_content) for i in range(run.n)]
        return self._long_opening(run, chunks, usage)

    def _long_opening(self, run: PromptRun, chunks: ChunkWriter, usage: Usage | None) -> Iterator[bytes]:
        ids = list(run.prompt_token_ids) if self._return_token_ids else None
        for i in range(run.n):
            yield chunks.role(
                i,
                self.role,
                prompt_token_ids=ids,
                prompt_text=self._prompt_text,
                usage=usage,
                content=self._first_content,
            )
        for i in range(run.n if self.echo else 0):
            yield chunks.rich_text(i, self.echo, usage=usage)

    def logprobs(self, run: PromptRun, delta: Delta) -> ChatLogprobs | None:
        style = self._style
        return None if style is None or delta.logprobs is None else chat_logprobs(delta.logprobs, delta.token_ids, style)

    def whole_logprobs(self, delta: Delta) -> ChatLogprobs | None:
        style = self._style
        return None if style is None or delta.logprobs is None else chat_pieces(delta.logprobs, delta.token_ids, style)


async def _choice(run: PromptRun, delta: Delta, chat_format: ChatFormat, with_ids: bool) -> ChatChoice:
    message, reason = ChatMessage(chat_format.role, chat_format.echo + delta.text), str(delta.finish_reason or "abort")
    if (parsed := chat_format.parsed) is not None:
        message = msgspec.structs.replace(await parsed.message(run, delta), role=chat_format.role)
        if chat_format.echo:
            message = msgspec.structs.replace(message, content=chat_format.echo + (message.content or ""))
        reason = parsed.finish_reason(delta.index, delta.finish_reason or "abort")
    return ChatChoice(
        index=delta.index,
        message=message,
        logprobs=chat_format.whole_logprobs(delta),
        finish_reason=reason,
        stop_reason=delta.stop_reason,
        token_ids=delta.token_ids if with_ids else msgspec.UNSET,
    )


def echoed_text(body: ChatRequest) -> str:
    """The text that `echo` puts before the answer: the last message's, if that is the assistant's."""
    last = body.messages[-1]
    if not body.echo or not isinstance(last, dict) or last.get("role") != "assistant":
        return ""
    content = last.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def _num_logprobs(body: ChatRequest, most: int) -> int | None:
    """Chat's `logprobs` (a flag) and `top_logprobs` (a number) as the engine takes them: None or a number."""
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    if body.top_logprobs == ALL_LOGPROBS:
        body.top_logprobs = most
    top = body.top_logprobs
    if top is not None and not 0 <= top <= most:
        raise invalid(f"top_logprobs must be at least 0 and at most {most}, got {top}", "top_logprobs")
    if top and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if body.logprobs else None
