"""POST /v1/chat/completions. Tools are rendered into the prompt by the model's template; a call comes back as plain content."""

import time

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.body import BodyDecoder
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.fields import echoed_text, num_kept
from quire.frontend.http.api.generate import Streaming, collect, includes_usage, running
from quire.frontend.http.api.logprobs import LogprobStyle, chat_logprobs, prompt_logprobs
from quire.frontend.http.api.params import SamplingRequest, check_model, encoded, prompt_text
from quire.frontend.http.api.prompt_run import PromptRun, usage_of
from quire.frontend.http.api.request_log import new_id
from quire.frontend.http.api.schemas import (
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    SamplingFields,
    Usage,
)
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import ChunkWriter, json_bytes
from quire.frontend.http.api.submit import submit
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.text.tokenizer import Tokenizer

_decoder = BodyDecoder(ChatRequest)


async def chat_completions(services: Services, request: Request, response: Response) -> None:
    body = _decoder.decode(request.take_body(), services.unknown_fields)
    client, limits, metrics = services.client, services.limits, services.metrics
    model = check_model(body.model, services.model_names)
    tokenizer = client.tokenizer
    newer = body.max_completion_tokens is not None  # OpenAI's newer name wins
    sampling = SamplingRequest(
        body,
        tokenizer,
        limits.max_model_len,
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        default_max_tokens=None,
        logprobs=_num_logprobs(body, limits.max_logprobs),
    )
    text = await prompt_text(body, tokenizer, services.trust_request_chat_template)
    keep = num_kept(body, limits.max_model_len, body.max_completion_tokens if newer else body.max_tokens)
    ids = await encoded(client, text, bool(body.add_special_tokens), keep, body.truncation_side)
    params = sampling.params(len(ids), "messages")
    name, created, runs = new_id("chatcmpl", request.headers, body.request_id), int(time.time()), list[PromptRun]()
    async with running(name, runs, metrics, services.request_log):
        runs.append(submit(client, body, ids, params, name, 0))
        services.request_log.started(name, runs, bool(body.stream))
        chat_format = ChatFormat(body, tokenizer, text)
        if body.stream:
            chunks = ChunkWriter(
                "chat", id=name, created=created, model=model, num_choices=params.n, null_usage=includes_usage(body)
            )
            await Streaming(response, chunks, chat_format, runs, body, metrics).run()
            return
        (deltas,) = await collect(runs, metrics)
        answer = ChatResponse(
            id=name,
            created=created,
            model=model,
            choices=[_choice(runs[0], delta, chat_format, bool(body.return_token_ids)) for delta in deltas],
            usage=usage_of(runs),
            prompt_logprobs=prompt_logprobs(runs[0].stream.prompt_logprobs),
            prompt_token_ids=ids if body.return_token_ids else msgspec.UNSET,
            prompt_text=text if body.return_prompt_text else msgspec.UNSET,
        )
    response.send(200, json_bytes(answer))


class ChatFormat:
    """Chat's part of a stream: the role first, then what is echoed, logprobs as `content`."""

    def __init__(self, body: SamplingFields, tokenizer: Tokenizer, prompt_text: str = "") -> None:
        assert isinstance(body, ChatRequest)
        self.echo = echoed_text(body)
        self._prompt_text = prompt_text if body.return_prompt_text else None
        self.wants_logprobs = bool(body.logprobs)
        self._return_token_ids = bool(body.return_token_ids)
        self._style = LogprobStyle(tokenizer, body.top_logprobs or 0, bool(body.return_tokens_as_token_ids))

    def opening(self, run: PromptRun, chunks: ChunkWriter, usage: Usage | None) -> list[bytes]:
        ids = list(run.prompt_token_ids) if self._return_token_ids else None
        texts = {"prompt_token_ids": ids, "prompt_text": self._prompt_text}
        opening = [chunks.role(i, usage=usage, **texts) for i in range(run.params.n)]  # type: ignore[arg-type]
        return [*opening, *(chunks.rich_text(i, self.echo, usage=usage) for i in range(run.params.n if self.echo else 0))]

    def logprobs(self, run: PromptRun, delta: Delta) -> ChatLogprobs | None:
        return None if delta.logprobs is None else chat_logprobs(delta.logprobs, delta.token_ids, self._style)


def _choice(run: PromptRun, delta: Delta, chat_format: ChatFormat, with_ids: bool) -> ChatChoice:
    return ChatChoice(
        index=delta.index,
        message=ChatMessage("assistant", chat_format.echo + delta.text),
        logprobs=chat_format.logprobs(run, delta),
        finish_reason=delta.finish_reason or "abort",
        stop_reason=delta.stop_reason,
        token_ids=delta.token_ids if with_ids else msgspec.UNSET,
    )


def _num_logprobs(body: ChatRequest, most: int) -> int | None:
    """Chat has a flag and a number; the engine takes None or a number."""
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    top = body.top_logprobs
    if top is not None and not 0 <= top <= most:
        raise invalid(f"top_logprobs must be at least 0 and at most {most}, got {top}", "top_logprobs")
    if top and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if body.logprobs else None
