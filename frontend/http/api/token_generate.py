"""POST /inference/v1/generate: token ids in, token ids out, in one piece or as server-sent events; vLLM has the same route.

It is for clients with a tokenizer of their own: routers, trainers, evaluation. sampling_params has SamplingParams' fields and
defaults, not those of the model's generation_config.json; without max_tokens the output may fill the context. Text is made only
to find stop strings.
"""

import re
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.checked import CheckedRequest, add_bad_words, check_stream_options
from quire.frontend.http.api.bodies.json_pieces import LARGE_ANSWER, send_json
from quire.frontend.http.api.bodies.logprobs import LogprobStyle, chat_logprobs, chat_pieces, prompt_logprobs
from quire.frontend.http.api.bodies.params import make_params
from quire.frontend.http.api.bodies.schemas import (
    FILLED_IN,
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
from quire.frontend.http.api.generate import Pump, collect, running
from quire.frontend.http.api.logs.request_log import new_id
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.prompt_run import PromptRun, usage_of
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import DONE, json_bytes
from quire.frontend.http.api.terms import terms_of
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response
from quire.ipc.sampling import ALL_LOGPROBS, RequestOutputKind, SamplingParams

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_UNSUPPORTED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")
# Fields of vLLM's SamplingParams that are refused; below, fields of ours that a client does not set here.
_REFUSED = (
    "guided_decoding", "logits_processors", "logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start",
    "repetition_detection", "routed_experts_prompt_start", "trace_decode_token_ids", "watermarking",
)  # fmt: skip
_NOT_TAKEN = (*FILLED_IN, "structured_outputs", "detokenize")

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
    timeout: float | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text", "derender"] | None = None
    reasoning_ended: bool | None = None
    # ignored; vLLM's render routes send them: about the rendered text, and for a parser of the answer
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
    """An event of a stream."""

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
    client, metrics = services.client, services.metrics
    model = await check_model(services, request, body.model)
    checked = _check(body)
    if checked.sampling.get("logprobs") == ALL_LOGPROBS:
        checked.sampling["logprobs"] = services.client.welcome.limits.max_logprobs
    terms = terms_of(services, request, body.timeout, body.priority)
    if checked.sampling.get("bad_words"):
        await add_bad_words(checked, client.tokenizer)
    params = make_params(checked, len(body.token_ids), client.welcome.limits.max_model_len)
    name = f"generate-tokens-{body.request_id}" if body.request_id else new_id("generate-tokens", request.headers)
    runs: list[PromptRun] = []
    async with running(name, runs, metrics, services.request_log):
        stream = client.submit(
            body.token_ids,
            params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            request_name=name,
            terms=terms,
        )
        run = PromptRun(stream, params, body.token_ids)
        run.max_tokens = checked.max_tokens  # metrics count it as it was sent
        runs.append(run)
        services.request_log.started(name, runs, bool(body.stream))
        choice = _choice_maker(services, params)
        if body.stream:
            body.stream_options = services.defaults.stream_options(body.stream_options)
            return await Pump(response, runs, metrics, _ChunkEvents(name, choice, runs, body)).run()
        (deltas,) = await collect(runs, metrics, services.max_response_bytes)
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


def _check(body: GenerateRequest) -> CheckedRequest:
    """Raises ApiError 400."""
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
    given["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY  # whatever the body says
    given["detokenize"] = bool(given.get("stop"))
    if "structured_outputs" in given:
        given["structured_outputs"] = structured_field("structured_outputs", given["structured_outputs"])
    max_tokens = given.pop("max_tokens", None)
    return CheckedRequest(
        sampling=given,
        max_tokens=max_tokens,
        prompt_field="token_ids",
        cuts_max_tokens=True,
        no_room="",  # the client refuses such a prompt
        extra_args="extra_args",
    )


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


class _ChunkEvents:
    """The events of one response (generate.StreamedAnswer): new token ids, one event for each choice and turn."""

    def __init__(self, name: str, choice: Callable[..., GenerateChoice], runs: list[PromptRun], body: GenerateRequest) -> None:
        self._name = name
        self._choice = choice
        self._runs = runs
        self._options = body.stream_options or StreamOptions()
        self._prompt_token_ids = body.token_ids if body.return_token_ids else msgspec.UNSET  # for the first event

    def opening(self, run: PromptRun) -> bytes:
        return b""

    def events(self, run: PromptRun, delta: Delta) -> bytes:
        if not delta.token_ids and delta.finish_reason is None:
            return b""
        first, self._prompt_token_ids = self._prompt_token_ids, msgspec.UNSET
        usage = usage_of(self._runs) if self._options.usage_in_every_event else None
        chunk = GenerateChunk(request_id=self._name, choices=[self._choice(delta)], usage=usage, prompt_token_ids=first)
        return _event(chunk)

    def writer(self, run: PromptRun) -> Callable[[Delta], bytes]:
        return lambda delta: self.events(run, delta)

    async def closing(self) -> bytes:
        last = GenerateChunk(request_id=self._name, choices=[], usage=usage_of(self._runs))
        return (_event(last) if self._options.include_usage else b"") + DONE


def _event(chunk: GenerateChunk) -> bytes:
    return b"data: %b\n\n" % json_bytes(chunk)
