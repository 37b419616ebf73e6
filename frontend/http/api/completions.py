"""POST /v1/completions: one or many prompts, as text or token ids, with OpenAI's legacy logprobs and echo."""

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence

import msgspec

from quire.frontend.client.client import Client
from quire.frontend.client.outputs import Delta, TokenLogprobDict
from quire.frontend.client.turns import in_thread
from quire.frontend.http.api.bodies.body import BodyDecoder
from quire.frontend.http.api.bodies.fields import num_kept
from quire.frontend.http.api.bodies.json_pieces import LARGE_ANSWER, pieces, send_json
from quire.frontend.http.api.bodies.logprobs import (
    LogprobStyle,
    RowsOfTokens,
    TextOffsets,
    add_completion_logprobs,
    completion_pieces,
    prompt_logprobs,
)
from quire.frontend.http.api.bodies.params import SamplingRequest, check_model, completion_prompts, encoded, truncated
from quire.frontend.http.api.bodies.reading import read_body
from quire.frontend.http.api.bodies.schemas import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.generate import Streaming, collect, includes_usage, running
from quire.frontend.http.api.logs.request_log import new_id
from quire.frontend.http.api.prompt_run import PromptRun, usage_of
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import ChunkWriter, json_bytes
from quire.frontend.http.api.submit import submit
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16

_decoder = BodyDecoder(CompletionRequest)


async def completions(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    services.defaults.fill(body)
    model = check_model(body.model, services.model_names)
    tokenizer, metrics = services.client.tokenizer, services.metrics
    _check(body)
    returns_prompt_logprobs = body.prompt_logprobs is not None
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        if body.use_beam_search:
            raise invalid("echo with logprobs is not available with use_beam_search: true", "echo")
        body.prompt_logprobs = body.logprobs  # the prompt's tokens are part of the answer
    prompts = completion_prompts(body)
    sampling = _sampling(body, tokenizer, services.limits.max_model_len)
    sampling.check_fan_out(len(prompts))
    await sampling.prepare()
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
            kind = Streaming if body.max_tokens != 0 else _EchoStreaming
            await kind(response, chunks, text_format, runs, body, metrics).run()
            return
        results = await collect(runs, metrics, services.max_response_bytes)
        pairs = [(run, delta) for run, deltas in zip(runs, results, strict=True) for delta in deltas]
        choices = [text_format.choice(run, delta, returns_prompt_logprobs) for run, delta in pairs]
        answer = CompletionResponse(id=name, created=created, model=model, choices=choices, usage=usage_of(runs))
    if text_format.is_large(runs):
        return await send_json(response, answer, services.max_response_bytes)
    response.send(200, json_bytes(answer))


def _check(body: CompletionRequest) -> None:
    if isinstance(body.logprobs, bool):
        body.logprobs = 1 if body.logprobs else None
    if body.thinking_token_budget not in (None, -1):
        text = "thinking_token_budget: only chats know where thoughts end; see /v1/chat/completions."
        raise ApiError(400, text, param="thinking_token_budget", code="unsupported_value")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens: 0 needs echo: true", "max_tokens")
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
            texts.append(await _echo_text(body, prompt, ids, client.tokenizer))
    return texts


async def _token_ids(client: Client, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    keep = num_kept(body, client.welcome.limits.max_model_len, body.max_tokens)
    if isinstance(prompt, str):
        ids = await encoded(client, prompt, body.add_special_tokens is not False, keep, body.truncation_side)
    else:
        ids = truncated(prompt, keep, body.truncation_side)
    if not ids:
        raise invalid("prompt must not be empty", "prompt")
    return ids


async def _echo_text(body: CompletionRequest, prompt: str | list[int], ids: list[int], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    skip_special = body.skip_special_tokens is not False
    return (
        tokenizer.decode(ids, skip_special)
        if len(ids) <= LARGE_ANSWER
        else await in_thread(tokenizer.decode, ids, skip_special)
    )


def _token_list(run: PromptRun) -> list[int]:
    """One list for all choices."""
    ids = run.prompt_token_ids
    return ids if isinstance(ids, list) else list(ids)


class _EchoStreaming(Streaming):
    """With max_tokens: 0. The engine makes a token of each prompt, of which nothing is shown."""

    def _is_alone(self, run: PromptRun) -> bool:
        return False  # nothing is passed on but by _events

    def _events(self, run: PromptRun, delta: Delta) -> list[bytes]:
        reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        return super()._events(run, Delta(delta.index, "", [], finish_reason=reason))


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
        self._text_offsets: dict[int, TextOffsets] = {}  # of each choice

    def is_large(self, runs: list[PromptRun]) -> bool:
        """Whether an answer in one piece might take long to encode."""
        num_ids = sum(sum(run.num_tokens) for run in runs)
        if self._echo_texts or self._return_token_ids:
            num_ids += self._n * sum(len(run.prompt_token_ids) for run in runs)
        return self.wants_logprobs or runs[0].params.prompt_logprobs is not None or num_ids > LARGE_ANSWER

    def opening(self, run: PromptRun, chunks: ChunkWriter, usage: Usage | None) -> Iterable[bytes]:
        """The prompt, if it is to be echoed or its ids are to be returned, in a chunk of its own for each choice."""
        if not self._echo_texts and not self._return_token_ids:
            return []
        text = self._echo_texts[run.first_choice // self._n] if self._echo_texts else ""
        ids = self._prompt_ids(run) if self._return_token_ids else None
        return itertools.chain.from_iterable(
            chunks.prompt_pieces(i, text, logprobs=self._prompt_pieces(run, i), prompt_token_ids=ids, usage=usage)
            for i in range(run.first_choice, run.first_choice + self._n)
        )

    def _prompt_ids(self, run: PromptRun) -> list[bytes]:
        """Encoded once for all choices."""
        return list(pieces(_token_list(run)))

    def _prompt_pieces(self, run: PromptRun, index: int) -> Iterable[bytes] | None:
        """Logprobs of the echoed prompt; None unless both were asked for."""
        rows = self._prompt_rows(run)
        if rows is None:
            return None
        text = self._echo_texts[run.first_choice // self._n]
        self._text_offsets[index] = self._style.offsets(len(text))
        return pieces(completion_pieces([(rows, run.prompt_token_ids, text)], self._style))

    def _prompt_rows(self, run: PromptRun) -> Sequence[TokenLogprobDict | None] | None:
        return run.prompt_logprobs() if self.wants_logprobs and self._echo_texts else None

    def logprobs(self, run: PromptRun, delta: Delta) -> CompletionLogprobs | None:
        return self._add_output(CompletionLogprobs(), run, delta) if delta.logprobs is not None else None

    def choice(self, run: PromptRun, delta: Delta, with_prompt_logprobs: bool) -> CompletionChoice:
        """A whole choice, for an answer in one piece."""
        index = run.first_choice + delta.index
        echo = self._echo_texts[run.first_choice // self._n] if self._echo_texts else ""
        logprobs = None
        if self.wants_logprobs:
            rows = self._prompt_rows(run)
            parts: list[RowsOfTokens] = [(rows, run.prompt_token_ids, echo)] if rows is not None else []
            parts += [] if self._no_output else [(delta.logprobs or [], delta.token_ids, None)]
            logprobs = completion_pieces(parts, self._style)
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
            prompt_token_ids=_token_list(run) if self._return_token_ids else msgspec.UNSET,
        )

    def _add_output(self, to: CompletionLogprobs, run: PromptRun, delta: Delta) -> CompletionLogprobs:
        index = run.first_choice + delta.index
        if index not in self._text_offsets:
            self._text_offsets[index] = self._style.offsets()
        add_completion_logprobs(to, delta.logprobs or [], delta.token_ids, self._style, self._text_offsets[index])
        return to
