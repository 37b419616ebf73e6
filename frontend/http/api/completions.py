"""POST /v1/completions: one or many prompts, as text or token ids, with OpenAI's legacy logprobs and echo."""

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence

import msgspec

from quire.frontend.client.client import Client
from quire.frontend.client.outputs import Delta, TokenLogprobDict
from quire.frontend.client.turns import in_thread
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.checked import CheckedRequest, add_bad_words, check_request
from quire.frontend.http.api.bodies.json_pieces import LARGE_ANSWER, pieces, send_json
from quire.frontend.http.api.bodies.logprobs import (
    LogprobStyle,
    RowsOfTokens,
    TextOffsets,
    add_completion_logprobs,
    completion_pieces,
    prompt_logprobs,
)
from quire.frontend.http.api.bodies.params import make_params
from quire.frontend.http.api.bodies.schemas import (
    MAX_PROMPTS,
    MAX_SEQUENCES,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
    check_supported,
)
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.generate import Pump, collect, running
from quire.frontend.http.api.logs.request_log import new_id
from quire.frontend.http.api.metrics.draft_metrics import draft_metrics
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.prompt import encoded, num_kept, truncated
from quire.frontend.http.api.prompt_run import PromptRun, submit, usage_of
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import ChunkEvents, ChunkWriter, includes_usage, json_bytes
from quire.frontend.http.api.terms import terms_of
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.sampling import ALL_LOGPROBS

DEFAULT_MAX_TOKENS = 16

_decoder = BodyDecoder(CompletionRequest)


async def completions(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    services.defaults.fill(body)
    client, metrics = services.client, services.metrics
    model = await check_model(services, request, body.model)
    tokenizer = client.tokenizer
    _check(body)
    if body.logprobs == ALL_LOGPROBS:
        body.logprobs = client.welcome.limits.max_logprobs
    returns_prompt_logprobs = body.prompt_logprobs is not None
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        if body.use_beam_search:
            raise invalid("echo with logprobs is not available with use_beam_search: true", "echo")
        body.prompt_logprobs = body.logprobs  # the prompt is part of the answer
    prompts = completion_prompts(body)
    checked = check_request(
        body,
        tokenizer,
        max_tokens=1 if body.max_tokens == 0 and body.echo else body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_logprobs=body.logprobs,
        prompt_field="prompt",
    )
    checked.is_for_prompt = body.max_tokens == 0
    _check_fan_out(body, len(prompts), checked.n)
    checked.terms = terms_of(services, request, body.timeout, body.priority)
    await add_bad_words(checked, tokenizer)
    told = client.welcome.drafts_told
    name, created, runs = new_id("cmpl", request.headers, body.request_id), int(time.time()), list[PromptRun]()
    async with running(name, runs, metrics, services.request_log):
        texts = await _submit(services, body, prompts, checked, name, runs)
        services.request_log.started(name, runs, bool(body.stream))
        text_format = CompletionFormat(body, tokenizer, texts, checked.n)
        if body.stream:
            num_choices = len(runs) * checked.n
            chunks = ChunkWriter(
                "completion", id=name, created=created, model=model, num_choices=num_choices, null_usage=includes_usage(body)
            )
            events, shown = (
                ChunkEvents(chunks, text_format, runs, body, told),
                _without_output if body.max_tokens == 0 else None,
            )
            return await Pump(response, runs, metrics, events, shown).run()
        results = await collect(runs, metrics, services.max_response_bytes)
        pairs = [(run, delta) for run, deltas in zip(runs, results, strict=True) for delta in deltas]
        choices = [text_format.choice(run, delta, returns_prompt_logprobs) for run, delta in pairs]
        usage, of_drafts = usage_of(runs), draft_metrics(runs, told)
        answer = CompletionResponse(id=name, created=created, model=model, choices=choices, usage=usage, metrics=of_drafts)
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


def completion_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """`prompt`, which has four shapes, as a list of texts and lists of token ids. Raises ApiError 400."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None:
        check_supported(body)
        raise ApiError(400, "prompt must not be null.", param="prompt", code="missing_required_parameter")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(kinds) != 1 or [] in prompt:
        raise invalid("prompt must be a text, a list of texts, token ids or a list of lists of token ids; no list may be empty",
                      "prompt")  # fmt: skip
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"prompt takes at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    return prompt  # type: ignore[return-value]


def _check_fan_out(body: CompletionRequest, num_prompts: int, n: int) -> None:
    num_sampled = max(n, body.best_of or 1)
    total, name = num_prompts * num_sampled, "n" if num_sampled == n else "best_of"
    if total > MAX_SEQUENCES:
        raise invalid(f"{name} times the number of prompts may be at most {MAX_SEQUENCES}, got {total}", name)


async def _submit(
    services: Services,
    body: CompletionRequest,
    prompts: list[str | list[int]],
    checked: CheckedRequest,
    name: str,
    runs: list[PromptRun],
) -> list[str]:
    """Submit every prompt and append it to `runs`. Returns the texts to echo, an empty list unless `echo` is set."""
    client, texts = services.client, list[str]()
    for prompt in prompts:
        ids = await _token_ids(client, body, prompt)
        params = make_params(checked, len(ids), client.welcome.limits.max_model_len)
        runs.append(submit(client, body, ids, params, checked, name, len(runs) * checked.n))
        if len(prompts) > 1:
            await asyncio.sleep(0)  # encoding may take milliseconds: let tokens of other requests go first
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
    """The prompt's ids as one list, which all its choices share."""
    ids = run.prompt_token_ids
    return ids if isinstance(ids, list) else list(ids)


def _without_output(delta: Delta) -> Delta:
    """A delta without its token: with max_tokens: 0 the engine still generates one, which is not shown."""
    return Delta(delta.index, "", [], finish_reason="length" if delta.finish_reason == "stop" else delta.finish_reason)


class CompletionFormat:
    """The parts of an answer that are completions' own: echo, and logprobs with text offsets that count through all chunks."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer, echo_texts: list[str], n: int) -> None:
        self.wants_logprobs = body.logprobs is not None
        self.parsed = None
        self._echo_texts = echo_texts
        self._n = n
        self._return_token_ids = bool(body.return_token_ids)
        self._no_output = body.max_tokens == 0
        skip_special = body.skip_special_tokens is not False
        self._style = LogprobStyle(tokenizer, body.logprobs or 0, bool(body.return_tokens_as_token_ids), skip_special)
        self._text_offsets: dict[int, TextOffsets] = {}  # by choice

    def is_large(self, runs: list[PromptRun]) -> bool:
        """Whether an answer in one piece might take long to encode."""
        num_ids = sum(sum(run.num_tokens) for run in runs)
        if self._echo_texts or self._return_token_ids:
            num_ids += self._n * sum(len(run.prompt_token_ids) for run in runs)
        return self.wants_logprobs or runs[0].params.prompt_logprobs is not None or num_ids > LARGE_ANSWER

    def opening(self, run: PromptRun, chunks: ChunkWriter, usage: Usage | None) -> Iterable[bytes]:
        """A chunk for each choice with the prompt, if that is echoed or its ids are returned."""
        if not self._echo_texts and not self._return_token_ids:
            return []
        text = self._echo_texts[run.first_choice // self._n] if self._echo_texts else ""
        ids = self._prompt_ids(run) if self._return_token_ids else None
        return itertools.chain.from_iterable(
            chunks.prompt_pieces(i, text, logprobs=self._prompt_pieces(run, i), prompt_token_ids=ids, usage=usage)
            for i in range(run.first_choice, run.first_choice + self._n)
        )

    def _prompt_ids(self, run: PromptRun) -> list[bytes]:
        """The prompt's ids as JSON, encoded once for all choices."""
        return list(pieces(_token_list(run)))

    def _prompt_pieces(self, run: PromptRun, index: int) -> Iterable[bytes] | None:
        """JSON of the echoed prompt's logprobs; None unless the request asks for both."""
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
        """A choice of an answer in one piece."""
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
