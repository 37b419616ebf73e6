"""POST /inference/v1/generate: token ids in, token ids out, as vLLM's route of that name; whole or as server-sent events.

For whoever has the tokenizer: routers, trainers, evaluation. sampling_params are SamplingParams' own fields and defaults, not
the model's generation_config.json; without max_tokens the output may fill the context. Text is made only to find stop strings.
"""

import re
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import Stream
from quire.frontend.http.api.bodies.body import BodyDecoder
from quire.frontend.http.api.bodies.fields import check_stream_options
from quire.frontend.http.api.bodies.json_pieces import LARGE_ANSWER, send_json
from quire.frontend.http.api.bodies.logprobs import LogprobStyle, chat_logprobs, chat_pieces, prompt_logprobs
from quire.frontend.http.api.bodies.params import check_model
from quire.frontend.http.api.bodies.reading import read_body
from quire.frontend.http.api.bodies.schemas import (
    CacheSalt,
    ChatLogprobs,
    Int32,
    PromptLogprobList,
    ShortText,
    StreamOptions,
    TokenId,
    Usage,
)
from quire.frontend.http.api.bodies.structured import StructuredOutputsFields, structured_field
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.generate import collect, running
from quire.frontend.http.api.logs.request_log import new_id
from quire.frontend.http.api.metrics.request_metrics import count_first_token
from quire.frontend.http.api.prompt_run import PromptRun, usage_of
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import DONE, json_bytes
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response, ResponseState
from quire.ipc.sampling import RequestOutputKind, SamplingParams

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_UNSUPPORTED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")
# What SamplingParams has and a client does not say here: what frontends fill in, and what asks for text.
_REFUSED = (
    "guided_decoding", "logits_processors", "logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start",
    "repetition_detection", "routed_experts_prompt_start", "trace_decode_token_ids", "watermarking",
)  # fmt: skip
_NOT_TAKEN = (
    "bad_words_token_ids", "reasoning_end_token_ids", "reasoning_start_token_ids", "structured_outputs", "detokenize",
    "output_kind",
)  # fmt: skip

TokenSamplingParams = msgspec.defstruct(
    "TokenSamplingParams",
    [(f.name, f.type | None, None) for f in msgspec.structs.fields(SamplingParams) if f.name not in _NOT_TAKEN]
    + [(name, Any, None) for name in _REFUSED]
    + [("structured_outputs", StructuredOutputsFields | None, None)]
    + [("detokenize", bool | None, None), ("output_kind", int | None, None)],
    kw_only=True,
)


class GenerateRequest(msgspec.Struct, kw_only=True):
    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling_params: TokenSamplingParams  # type: ignore[valid-type]
    request_id: ShortText | None = None
    model: ShortText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Int32 | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text", "derender"] | None = None
    reasoning_ended: bool | None = None
    # of vLLM's render routes: about the text that was, and for a parser of the answer
    token_offsets: Any = None
    reasoning_parser_kwargs: Any = None
    parse_context: Any = None
    # refused
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class GenerateChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    request_id: str
    choices: list[GenerateChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    created: int
    model: str
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: None = None


_decoder = BodyDecoder(GenerateRequest)


async def generate(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    model = check_model(body.model, services.model_names)
    params = _params(body)
    name = f"generate-tokens-{body.request_id}" if body.request_id else new_id("generate-tokens", request.headers)
    runs: list[PromptRun] = []
    async with running(name, runs, services.metrics, services.request_log):
        stream = services.client.submit(
            body.token_ids, params, priority=body.priority or 0, cache_salt=body.cache_salt or "", request_name=name
        )
        run = PromptRun(stream, params, body.token_ids, 0)
        runs.append(run)
        services.request_log.started(name, runs, bool(body.stream))
        choice = _choice_maker(services, params)
        if body.stream:
            body.stream_options = services.defaults.stream_options(body.stream_options)
            return await _stream(services, response, stream, run, name, choice, body)
        (deltas,) = await collect(runs, services.metrics, services.max_response_bytes)
        answer = GenerateResponse(
            request_id=name,
            created=int(time.time()),
            model=model,
            choices=[choice(delta, True) for delta in deltas],
            usage=usage_of(runs),
            prompt_logprobs=prompt_logprobs(run.prompt_logprobs()),
            prompt_token_ids=body.token_ids if body.return_token_ids else msgspec.UNSET,
        )
    num_ids = sum(run.num_tokens) + (len(body.token_ids) if body.return_token_ids else 0)
    if params.logprobs is None and params.prompt_logprobs is None and num_ids <= LARGE_ANSWER:
        return response.send(200, json_bytes(answer))
    await send_json(response, answer, services.max_response_bytes)


def _params(body: GenerateRequest) -> SamplingParams:
    for holder, names in ((body, _UNSUPPORTED), (body.sampling_params, _REFUSED)):
        for name in names:
            if getattr(holder, name):
                raise ApiError(400, f"{name}: this value is not supported on this route.", param=name, code="unsupported_value")
    if body.request_id is not None and not _NAME.fullmatch(body.request_id):
        raise invalid("request_id may hold letters, digits and ._:- and be at most 128 characters long", "request_id")
    check_stream_options(body)
    given = {n: v for n in SamplingParams.__struct_fields__ if (v := getattr(body.sampling_params, n, None)) is not None}
    if given.get("prompt_logprobs") is not None and body.stream:
        raise invalid("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    _check_vllms(body, "structured_outputs" in given)
    given["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY  # not what the body says
    given["detokenize"] = bool(given.get("stop"))
    if "structured_outputs" in given:
        given["structured_outputs"] = structured_field("structured_outputs", given["structured_outputs"])
    try:
        return SamplingParams(**{"max_tokens": None, **given})
    except ValueError as error:
        raise invalid(str(error)) from None


def _check_vllms(body: GenerateRequest, is_structured: bool) -> None:
    if body.output_mode not in (None, "tokens"):
        why = "output_mode: only 'tokens' are answered on this route; /detokenize makes text of them."
        raise ApiError(400, why, param="output_mode", code="unsupported_value")
    if body.reasoning_ended is False and is_structured:
        why = "reasoning_ended: structured outputs begin with the first token on this route; leave it out, or send true."
        raise ApiError(400, why, param="reasoning_ended", code="unsupported_value")


def _choice_maker(services: Services, params: SamplingParams) -> Callable[..., GenerateChoice]:
    tokenizer = services.client.tokenizer if params.logprobs is not None else None
    style = LogprobStyle(tokenizer, params.logprobs or 0, as_token_ids=True) if tokenizer is not None else None

    def choice(delta: Delta, whole: bool = False) -> GenerateChoice:
        logprobs = None
        if style is not None and delta.logprobs is not None:
            logprobs = (chat_pieces if whole else chat_logprobs)(delta.logprobs, delta.token_ids, style)
        ids = list(delta.token_ids)
        return GenerateChoice(
            index=delta.index,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=ids,
        )

    return choice


async def _stream(
    services: Services,
    response: Response,
    stream: Stream,
    run: PromptRun,
    name: str,
    choice: Callable[..., GenerateChoice],
    body: GenerateRequest,
) -> None:
    """Events of new ids, one a choice and turn; the head goes out with the first, so that an earlier failure has its status."""
    options, first = body.stream_options or StreamOptions(), body.token_ids if body.return_token_ids else msgspec.UNSET
    async for deltas in stream:
        count_first_token(services.metrics, run)
        events = []
        for delta in deltas:
            run.num_tokens[delta.index] = delta.num_tokens
            if delta.finish_reason is not None:
                run.finish_reasons[delta.index] = delta.finish_reason
                services.metrics.count("request_success", delta.finish_reason)
            if delta.token_ids or delta.finish_reason is not None:
                usage = usage_of([run]) if options.usage_in_every_event else None
                chunk = GenerateChunk(request_id=name, choices=[choice(delta)], usage=usage, prompt_token_ids=first)
                events.append(_event(chunk))
                first = msgspec.UNSET
        if response.state is ResponseState.WAITING:
            response.start(first=b"".join(events))
        else:
            response.write(b"".join(events))
        await response.drain()
    last = b""
    if options.include_usage:
        last = _event(GenerateChunk(request_id=name, choices=[], usage=usage_of([run])))
    response.end(last + DONE)


def _event(chunk: GenerateChunk) -> bytes:
    return b"data: %b\n\n" % json_bytes(chunk)
