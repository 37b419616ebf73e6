"""POST /v1/completions: one or many prompts, as text or token ids, with OpenAI's legacy logprobs and echo."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.generate import Job, Streaming, collect, running, usage_of
from quire.frontend.http.api.logprobs import LogprobStyle, add_completion_logprobs, prompt_logprobs
from quire.frontend.http.api.params import Wanted, check_model, completion_prompts, encoded, truncated
from quire.frontend.http.api.request_log import new_id
from quire.frontend.http.api.schemas import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
    decode,
)
from quire.frontend.http.api.sse import ChunkWriter, json_bytes
from quire.frontend.http.protocol.errors import invalid
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.frontend.http.api.app import App

DEFAULT_MAX_TOKENS = 16

_decoder = msgspec.json.Decoder(CompletionRequest)


async def completions(app: "App", request: Request, response: Response) -> None:
    body = decode(_decoder, request.take_body(), app.unknown_fields)
    model = check_model(body.model, app.client.welcome.served_model_names)
    tokenizer = app.client.tokenizer
    _check(body)
    returns_prompt_logprobs = body.prompt_logprobs is not None
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        body.prompt_logprobs = body.logprobs  # the prompt's tokens are part of the answer
    prompts = completion_prompts(body)
    wanted = Wanted(
        body,
        tokenizer,
        app.client.welcome.limits.max_model_len,
        max_tokens=1 if body.max_tokens == 0 and body.echo else body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
    )
    wanted.check_fan_out(len(prompts))
    texts: list[str] = []
    name, created, jobs = new_id("cmpl", request.headers), int(time.time()), list[Job]()
    async with running(name, jobs, app.metrics, app.request_log):
        for prompt in prompts:
            ids = await _token_ids(app, body, prompt)
            params = wanted.params(len(ids), "prompt")
            stream = app.client.submit(
                ids, params, priority=body.priority or 0, cache_salt=body.cache_salt or "", request_name=name
            )
            jobs.append(Job(stream, params, ids, len(jobs) * params.n))
            if len(prompts) > 1:
                await asyncio.sleep(0)  # encoding may take milliseconds: others' tokens go first
            if body.echo:
                texts.append(_echo_text(body, prompt, ids, tokenizer))
        app.request_log.begun(name, jobs, bool(body.stream))
        shape = CompletionShape(body, tokenizer, texts, wanted.n)
        if body.stream:
            null_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            chunks = ChunkWriter(
                "completion", id=name, created=created, model=model, num_choices=len(jobs) * wanted.n, null_usage=null_usage
            )
            await Streaming(response, chunks, shape, jobs, body, app.metrics).run()
            return
        results = await collect(jobs, app.metrics)
        pairs = [(job, delta) for job, deltas in zip(jobs, results, strict=True) for delta in deltas]
        choices = [shape.choice(job, delta, returns_prompt_logprobs) for job, delta in pairs]
        answer = CompletionResponse(id=name, created=created, model=model, choices=choices, usage=usage_of(jobs))
    response.send(200, json_bytes(answer))


def _check(body: CompletionRequest) -> None:
    if body.max_tokens == 0 and (not body.echo or body.stream):
        raise invalid("max_tokens: 0 needs echo: true and stream: false", "max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs is not available with stream: true", "prompt_logprobs")


async def _token_ids(app: "App", body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    keep = body.truncate_prompt_tokens
    if isinstance(prompt, str):
        ids = await encoded(app.client, prompt, body.add_special_tokens is not False, keep)
    else:
        ids = truncated(prompt, keep)
    if not ids:
        raise invalid("prompt must not be empty", "prompt")
    return ids


def _echo_text(body: CompletionRequest, prompt: str | list[int], ids: list[int], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return tokenizer.decode(ids, body.skip_special_tokens is not False)


class CompletionShape:
    """Completions' part of an answer: echo and logprobs with text offsets, which run on over a choice's chunks."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer, echo_texts: list[str], n: int) -> None:
        self.logprobs_wanted = body.logprobs is not None
        self._echo_texts = echo_texts
        self._n = n
        self._return_token_ids = bool(body.return_token_ids)
        self._no_output = body.max_tokens == 0
        skip_special = body.skip_special_tokens is not False
        self._style = LogprobStyle(tokenizer, body.logprobs or 0, bool(body.return_tokens_as_token_ids), skip_special)
        self._text_offsets: dict[int, int] = {}  # of each choice

    def opening(self, job: Job, chunks: ChunkWriter, usage: Usage | None) -> list[bytes]:
        """The prompt, if it is to be echoed or its ids are to be returned, in a chunk of its own for each choice."""
        if not self._echo_texts and not self._return_token_ids:
            return []
        text = self._echo_texts[job.first_choice // self._n] if self._echo_texts else ""
        ids = list(job.prompt_token_ids) if self._return_token_ids else None
        common: dict[str, Any] = {"token_ids": [] if ids else None, "prompt_token_ids": ids, "usage": usage}
        return [
            chunks.rich_text(i, text, logprobs=self._prompt_part(job, i), **common)
            for i in range(job.first_choice, job.first_choice + self._n)
        ]

    def logprobs(self, job: Job, delta: Delta) -> CompletionLogprobs | None:
        return self._add_output(CompletionLogprobs(), job, delta) if delta.logprobs is not None else None

    def choice(self, job: Job, delta: Delta, with_prompt_logprobs: bool) -> CompletionChoice:
        """A whole choice, for an answer in one piece."""
        index = job.first_choice + delta.index
        logprobs = None
        if self.logprobs_wanted:
            logprobs = self._prompt_part(job, index) or CompletionLogprobs()
            logprobs = logprobs if self._no_output else self._add_output(logprobs, job, delta)
        echo = self._echo_texts[job.first_choice // self._n] if self._echo_texts else ""
        if self._no_output:
            job.num_tokens[delta.index] = 0
        return CompletionChoice(
            index=index,
            text=echo if self._no_output else echo + delta.text,
            logprobs=logprobs,
            finish_reason="length" if self._no_output else delta.finish_reason or "abort",
            stop_reason=None if self._no_output else delta.stop_reason,
            prompt_logprobs=prompt_logprobs(job.prompt_logprobs()) if with_prompt_logprobs else None,
            token_ids=delta.token_ids if self._return_token_ids else msgspec.UNSET,
            prompt_token_ids=list(job.prompt_token_ids) if self._return_token_ids else msgspec.UNSET,
        )

    def _prompt_part(self, job: Job, index: int) -> CompletionLogprobs | None:
        """Logprobs of the echoed prompt; None unless both were asked for."""
        rows = job.prompt_logprobs()
        if not self.logprobs_wanted or not self._echo_texts or rows is None:
            return None
        part = CompletionLogprobs()
        self._text_offsets[index] = add_completion_logprobs(part, rows, job.prompt_token_ids, self._style, 0)
        return part

    def _add_output(self, to: CompletionLogprobs, job: Job, delta: Delta) -> CompletionLogprobs:
        index = job.first_choice + delta.index
        offset = self._text_offsets.get(index, 0)
        self._text_offsets[index] = add_completion_logprobs(to, delta.logprobs or [], delta.token_ids, self._style, offset)
        return to
