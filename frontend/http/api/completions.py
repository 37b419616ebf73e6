"""POST /v1/completions: one or many prompts, as text or token ids, with OpenAI's legacy logprobs and echo."""

import asyncio
import time
from typing import Any

import msgspec

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.body import BodyDecoder
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.fields import num_kept
from quire.frontend.http.api.generate import Streaming, collect, includes_usage, running
from quire.frontend.http.api.logprobs import LogprobStyle, add_completion_logprobs, prompt_logprobs
from quire.frontend.http.api.params import SamplingRequest, check_model, completion_prompts, encoded, truncated
from quire.frontend.http.api.prompt_run import PromptRun, usage_of
from quire.frontend.http.api.request_log import new_id
from quire.frontend.http.api.schemas import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import ChunkWriter, json_bytes
from quire.frontend.http.api.submit import submit
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16

_decoder = BodyDecoder(CompletionRequest)


async def completions(services: Services, request: Request, response: Response) -> None:
    body = _decoder.decode(request.take_body(), services.unknown_fields)
    model = check_model(body.model, services.model_names)
    tokenizer, metrics = services.client.tokenizer, services.metrics
    _check(body)
    returns_prompt_logprobs = body.prompt_logprobs is not None
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        body.prompt_logprobs = body.logprobs  # the prompt's tokens are part of the answer
    prompts = completion_prompts(body)
    sampling = _sampling(body, tokenizer, services.limits.max_model_len)
    sampling.check_fan_out(len(prompts))
    name, created, runs = new_id("cmpl", request.headers, body.request_id), int(time.time()), list[PromptRun]()
    async with running(name, runs, metrics, services.request_log):
        texts = await _submit(services, body, prompts, sampling, name, runs)
        services.request_log.started(name, runs, bool(body.stream))
        text_format = CompletionFormat(body, tokenizer, texts, sampling.n)
        if body.stream:
            num_choices = len(runs) * sampling.n
            chunks = ChunkWriter(
                "completion", id=name, created=created, model=model, num_choices=num_choices, null_usage=includes_usage(body)
            )
            await Streaming(response, chunks, text_format, runs, body, metrics).run()
            return
        results = await collect(runs, metrics)
        pairs = [(run, delta) for run, deltas in zip(runs, results, strict=True) for delta in deltas]
        choices = [text_format.choice(run, delta, returns_prompt_logprobs) for run, delta in pairs]
        answer = CompletionResponse(id=name, created=created, model=model, choices=choices, usage=usage_of(runs))
    response.send(200, json_bytes(answer))


def _check(body: CompletionRequest) -> None:
    if isinstance(body.logprobs, bool):
        body.logprobs = 1 if body.logprobs else None
    if body.max_tokens == 0 and (not body.echo or body.stream):
        raise invalid("max_tokens: 0 needs echo: true and stream: false", "max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs is not available with stream: true", "prompt_logprobs")


def _sampling(body: CompletionRequest, tokenizer: Tokenizer, max_model_len: int) -> SamplingRequest:
    return SamplingRequest(
        body,
        tokenizer,
        max_model_len,
        max_tokens=1 if body.max_tokens == 0 and body.echo else body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
    )


async def _submit(
    services: Services,
    body: CompletionRequest,
    prompts: list[str | list[int]],
    sampling: SamplingRequest,
    name: str,
    runs: list[PromptRun],
) -> list[str]:
    """Submit every prompt, appending to `runs`; returns the texts to echo, if they are asked for."""
    client, texts = services.client, list[str]()
    for prompt in prompts:
        ids = await _token_ids(client, body, prompt)
        params = sampling.params(len(ids), "prompt")
        runs.append(submit(client, body, ids, params, name, len(runs) * params.n))
        if len(prompts) > 1:
            await asyncio.sleep(0)  # encoding may take milliseconds: others' tokens go first
        if body.echo:
            texts.append(_echo_text(body, prompt, ids, client.tokenizer))
    return texts


async def _token_ids(client: AsyncClient, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    keep = num_kept(body, client.welcome.limits.max_model_len, body.max_tokens)
    if isinstance(prompt, str):
        ids = await encoded(client, prompt, body.add_special_tokens is not False, keep, body.truncation_side)
    else:
        ids = truncated(prompt, keep, body.truncation_side)
    if not ids:
        raise invalid("prompt must not be empty", "prompt")
    return ids


def _echo_text(body: CompletionRequest, prompt: str | list[int], ids: list[int], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return tokenizer.decode(ids, body.skip_special_tokens is not False)


class CompletionFormat:
    """Completions' part of an answer: echo and logprobs with text offsets, which run on over a choice's chunks."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer, echo_texts: list[str], n: int) -> None:
        self.wants_logprobs = body.logprobs is not None
        self.parsed = None
        self._echo_texts = echo_texts
        self._n = n
        self._return_token_ids = bool(body.return_token_ids)
        self._no_output = body.max_tokens == 0
        skip_special = body.skip_special_tokens is not False
        self._style = LogprobStyle(tokenizer, body.logprobs or 0, bool(body.return_tokens_as_token_ids), skip_special)
        self._text_offsets: dict[int, int] = {}  # of each choice

    def opening(self, run: PromptRun, chunks: ChunkWriter, usage: Usage | None) -> list[bytes]:
        """The prompt, if it is to be echoed or its ids are to be returned, in a chunk of its own for each choice."""
        if not self._echo_texts and not self._return_token_ids:
            return []
        text = self._echo_texts[run.first_choice // self._n] if self._echo_texts else ""
        ids = list(run.prompt_token_ids) if self._return_token_ids else None
        common: dict[str, Any] = {"token_ids": [] if ids else None, "prompt_token_ids": ids, "usage": usage}
        return [
            chunks.rich_text(i, text, logprobs=self._prompt_part(run, i), **common)
            for i in range(run.first_choice, run.first_choice + self._n)
        ]

    def logprobs(self, run: PromptRun, delta: Delta) -> CompletionLogprobs | None:
        return self._add_output(CompletionLogprobs(), run, delta) if delta.logprobs is not None else None

    def choice(self, run: PromptRun, delta: Delta, with_prompt_logprobs: bool) -> CompletionChoice:
        """A whole choice, for an answer in one piece."""
        index = run.first_choice + delta.index
        logprobs = None
        if self.wants_logprobs:
            logprobs = self._prompt_part(run, index) or CompletionLogprobs()
            logprobs = logprobs if self._no_output else self._add_output(logprobs, run, delta)
        echo = self._echo_texts[run.first_choice // self._n] if self._echo_texts else ""
        token_ids = [] if self._no_output else delta.token_ids
        if self._no_output:
            run.num_tokens[delta.index] = 0
        return CompletionChoice(
            index=index,
            text=echo if self._no_output else echo + delta.text,
            logprobs=logprobs,
            finish_reason="length" if self._no_output else delta.finish_reason or "abort",
            stop_reason=None if self._no_output else delta.stop_reason,
            prompt_logprobs=prompt_logprobs(run.prompt_logprobs()) if with_prompt_logprobs else None,
            token_ids=token_ids if self._return_token_ids else msgspec.UNSET,
            prompt_token_ids=list(run.prompt_token_ids) if self._return_token_ids else msgspec.UNSET,
        )

    def _prompt_part(self, run: PromptRun, index: int) -> CompletionLogprobs | None:
        """Logprobs of the echoed prompt; None unless both were asked for."""
        rows = run.prompt_logprobs()
        if not self.wants_logprobs or not self._echo_texts or rows is None:
            return None
        part = CompletionLogprobs()
        self._text_offsets[index] = add_completion_logprobs(part, rows, run.prompt_token_ids, self._style, 0)
        return part

    def _add_output(self, to: CompletionLogprobs, run: PromptRun, delta: Delta) -> CompletionLogprobs:
        index = run.first_choice + delta.index
        offset = self._text_offsets.get(index, 0)
        self._text_offsets[index] = add_completion_logprobs(to, delta.logprobs or [], delta.token_ids, self._style, offset)
        return to
