"""POST /v1/chat/completions. Tools are rendered into the prompt by the model's template; a call comes back as plain content."""

import time
from typing import TYPE_CHECKING

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.generate import Job, Streaming, collect, running, usage_of
from quire.frontend.http.api.logprobs import LogprobStyle, chat_logprobs, prompt_logprobs
from quire.frontend.http.api.params import Wanted, chat_text, check_model, encoded
from quire.frontend.http.api.request_log import new_id
from quire.frontend.http.api.schemas import (
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    SamplingFields,
    Usage,
    decode,
)
from quire.frontend.http.api.sse import ChunkWriter, json_bytes
from quire.frontend.http.protocol.errors import ApiError, invalid
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.frontend.http.api.app import App

_decoder = msgspec.json.Decoder(ChatRequest)


async def chat_completions(app: "App", request: Request, response: Response) -> None:
    body = decode(_decoder, request.take_body(), app.unknown_fields)
    model = check_model(body.model, app.client.welcome.served_model_names)
    tokenizer = app.client.tokenizer
    wanted = Wanted(
        body,
        tokenizer,
        app.client.welcome.limits.max_model_len,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        default_max_tokens=None,
        logprobs=_num_logprobs(body, app.client.welcome.limits.max_logprobs),
    )
    text = chat_text(body, tokenizer)
    ids = await encoded(app.client, text, bool(body.add_special_tokens), body.truncate_prompt_tokens)
    params = wanted.params(len(ids), "messages")
    name, created, jobs = new_id("chatcmpl", request.headers), int(time.time()), list[Job]()
    async with running(name, jobs, app.metrics, app.request_log):
        stream = app.client.submit(
            ids, params, priority=body.priority or 0, cache_salt=body.cache_salt or "", request_name=name
        )
        jobs.append(Job(stream, params, ids, 0))
        app.request_log.begun(name, jobs, bool(body.stream))
        shape = ChatShape(body, tokenizer)
        if body.stream:
            null_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            chunks = ChunkWriter(
                "chat", id=name, created=created, model=model, num_choices=params.n, null_usage=null_usage
            )  # fmt: skip
            await Streaming(response, chunks, shape, jobs, body, app.metrics).run()
            return
        (deltas,) = await collect(jobs, app.metrics)
        answer = ChatResponse(
            id=name,
            created=created,
            model=model,
            choices=[_choice(jobs[0], delta, shape, bool(body.return_token_ids)) for delta in deltas],
            usage=usage_of(jobs),
            prompt_logprobs=prompt_logprobs(stream.prompt_logprobs),
            prompt_token_ids=ids if body.return_token_ids else msgspec.UNSET,
        )
    response.send(200, json_bytes(answer))


class ChatShape:
    """Chat's part of a stream: the role first, logprobs as `content`."""

    def __init__(self, body: SamplingFields, tokenizer: Tokenizer) -> None:
        assert isinstance(body, ChatRequest)
        self.logprobs_wanted = bool(body.logprobs)
        self._return_token_ids = bool(body.return_token_ids)
        self._style = LogprobStyle(tokenizer, body.top_logprobs or 0, bool(body.return_tokens_as_token_ids))

    def opening(self, job: Job, chunks: ChunkWriter, usage: Usage | None) -> list[bytes]:
        ids = list(job.prompt_token_ids) if self._return_token_ids else None
        return [chunks.role(i, prompt_token_ids=ids, usage=usage) for i in range(job.params.n)]

    def logprobs(self, job: Job, delta: Delta) -> ChatLogprobs | None:
        return None if delta.logprobs is None else chat_logprobs(delta.logprobs, delta.token_ids, self._style)


def _choice(job: Job, delta: Delta, shape: ChatShape, with_ids: bool) -> ChatChoice:
    return ChatChoice(
        index=delta.index,
        message=ChatMessage("assistant", delta.text),
        logprobs=shape.logprobs(job, delta),
        finish_reason=delta.finish_reason or "abort",
        stop_reason=delta.stop_reason,
        token_ids=delta.token_ids if with_ids else msgspec.UNSET,
    )


def _num_logprobs(body: ChatRequest, most: int) -> int | None:
    """Chat has a flag and a number; the engine takes None or a number."""
    if body.echo:
        raise ApiError(400, "echo: not supported for chats.", param="echo", code="unsupported_value")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    top = body.top_logprobs
    if top is not None and not 0 <= top <= most:
        raise invalid(f"top_logprobs must be at least 0 and at most {most}, got {top}", "top_logprobs")
    if top and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if body.logprobs else None
