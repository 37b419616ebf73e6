"""Target: bodies of every route, through the real application over a fake wire, with a client that answers at once.

A body that is right is changed, and sent. Whatever it is, the answer is complete, below 500, and JSON or a stream of it; a
refusal names the field; and a request that the frontend accepts is one that the engine's socket takes. Grammars are
compiled as the core would, so that a bad schema is told as the field that it came in.
"""

import asyncio
import functools
import json
from collections.abc import Sequence
from typing import Any

import fake_client as http
import msgspec
from fake_http import Answer, parse_answers
from fuzz.body_seeds import FORM, SEEDS
from fuzz.case import Case, Draw, Finding, Target, must
from fuzz.mutate import ODD_TEXTS, at, json_bytes, mutated_bytes, mutated_json, mutated_text, places, replaced
from harmony_cases import MARKERS
from harmony_template import TEMPLATE as HARMONY
from messages_cases import HERMES, QWEN3

from quire.enginecore.grammar.trial import Trial
from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.openapi import document
from quire.frontend.http.api.routes import ROUTES
from quire.frontend.http.limits.key_limits import KeyLimit, KeyLimits
from quire.frontend.text.detokenizer import OutputText
from quire.ipc.links.request_check import problem_with
from quire.ipc.messages.frontend import AddRequest, FrontendMessage, Generate, TokenInputs
from quire.ipc.sampling import SamplingParams, check_against
from quire.ipc.structured_outputs import StructuredOutputs

JSON = "application/json"
DATA = frozenset(  # fields of which all content is the client's own
    (
        "parameters",
        "input_schema",
        "schema",
        "chat_template_kwargs",
        "metadata",
        "arguments",
        "vllm_xargs",
        "logit_bias",
        "json",
        "action",
        "guided_json",
        "cache_control",
        "structured_outputs",
        "structural_tag",
        "format",
        "structures",
        "documents",
        "input_examples",
        "context_management",
    )
)
TEMPLATES = {"plain": http.TEMPLATE, "limited": http.TEMPLATE, "hermes": HERMES, "thinks": QWEN3, "harmony": HARMONY}
OUTPUTS = [
    http.FakeClient.OUTPUT,
    '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn \\ud83d\\ude00"}}\n</tool_call>',
    'Sure.<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n"}}\n</tool_call><tool_call>{"name": "box__open", "arg',
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": 1}',
    '[{"name": "clock", "parameters": {}}]',
    " ",
]
# Errors that are about the whole body, the request, or what is kept, and not about a field of the body.
WITHOUT_FIELD = frozenset(
    (
        "invalid_json",
        "body_too_complex",
        "bad_request",
        "not_found",
        "invalid_form",
        "context_length_exceeded",
        "file_too_large",
    )
)
_LONGEST_GRAMMAR = 4000
_decode = msgspec.msgpack.Decoder(FrontendMessage).decode


def seeds() -> Sequence[Case]:
    found = [_case(model, path, json.dumps(body).encode(), says) for says, (model, path, body) in enumerate(SEEDS)]
    found.append(
        Case({"model": "plain", "path": "/v1/files", "type": "multipart/form-data; boundary=b", "says": 0, "headers": []}, FORM)
    )
    for route in ROUTES.routes:
        if route.method in ("GET", "DELETE") and "{" in route.path:
            path = route.path.replace("{", "").replace("}", "").replace(":path", "")
            found.append(
                Case({"method": route.method, "model": "plain", "path": path, "type": JSON, "says": 0, "headers": []}, b"")
            )
    return found


def _case(model: str, path: str, body: bytes, says: int) -> Case:
    return Case({"model": model, "path": path, "type": JSON, "says": says % len(OUTPUTS), "headers": []}, body)


@functools.cache
def _names() -> list[str]:
    """The names of all fields in bodies."""
    schemas = document(ROUTES.routes, "")["components"]["schemas"]
    return sorted({name for schema in schemas.values() for name in schema.get("properties", ())})


def mutate(draw: Draw, case: Case, others: Sequence[Case]) -> Case:
    head = {**case.head, "says": draw.randrange(len(OUTPUTS))}
    head.pop("null", None)
    if draw.random() < 0.1:
        head["model"] = draw.choice(list(TEMPLATES))
    if draw.random() < 0.05:
        head["path"] = draw.choice(others).head["path"]
    if draw.random() < 0.04:
        head["path"] = "/" + mutated_text(
            draw, head["path"], ["?limit=0", "?after=x", "?config_format=json", "%00", "%ff"]
        ).strip(" \r\n\t/")
    if draw.random() < 0.08:
        name = draw.choice(
            ["X-Request-Timeout-S", "X-Request-Id", "Accept", "traceparent", "Content-Encoding", "Authorization"]
        )
        head["headers"] = [[name, draw.choice([*ODD_TEXTS, "0.5", "1e-9", "inf", "Bearer k"])]]
    if not case.head["type"].startswith(JSON) or not case.payload:
        return Case(head, mutated_bytes(draw, case.payload, [b"--b", b"\r\n", b'; name="', b'; filename="']))
    if (value := _object(case.payload)) is None:
        return Case(head, mutated_bytes(draw, case.payload))
    if draw.random() < 0.15 and isinstance(value, dict):
        return _with_null(draw, head, value)
    parts = [part for other in draw.sample(list(others), 4) if (part := _object(other.payload))]
    body = json_bytes(draw, mutated_json(draw, value, parts, _names()))
    return Case(head, body[: 200 << 10])


def _with_null(draw: Draw, head: dict[str, Any], value: dict[str, Any]) -> Case:
    """A field of the API is null: one that the body has, or another one. Head says which."""
    path = draw.choice([p for p in places(value) if isinstance(at(value, p), dict) and not DATA.intersection(p)])
    fields = at(value, path)
    if not path or draw.random() < 0.5:
        name = draw.choice(_names() if draw.random() < 0.5 else [*fields, "type"])
    else:
        name = draw.choice([*fields, "type", "name", "content", "id", "strict", "description", "status"])
    if name in DATA:
        name = "user"
    body = replaced(value, path, {**fields, name: None})
    return Case({**head, "null": [*path, name]}, json.dumps(body).encode())


def _object(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


# --------------------------------------------------------------------------------------------------------------- a case
class HarmonyClient(http.FakeClient):
    """Says OUTPUT as the real client shows it: markers that are special tokens come as marks."""

    def say_output(self, stream: http.FakeStream) -> None:
        asyncio.get_running_loop().call_soon(self._say, stream)  # the route marks tokens after it has submitted

    def _say(self, stream: http.FakeStream) -> None:
        stream.num_cached_tokens, ids = 4, self.tokenizer.encode(self.OUTPUT, add_special_tokens=False)
        texts = [OutputText(self.tokenizer, stream.params) for _ in range(stream.params.n)]
        for num_tokens, token in enumerate(ids, 1):
            end = "stop" if num_tokens == len(ids) else None
            for i, text in enumerate(texts):
                text.mark(stream.marks)
                rows = None if stream.params.logprobs is None else [self.row(token, stream.params.logprobs)]
                stream.push(Delta(i, text.push([token], end is not None), [token], rows, end, None, num_tokens))
        stream.end()


@functools.cache
def _client(model: str) -> http.FakeClient:
    if model == "harmony":
        return HarmonyClient(template=HARMONY, special=MARKERS)
    return http.FakeClient(template=TEMPLATES[model], special=("<think>", "</think>"))


def _api(case: Case) -> http.Api:
    client = _client(case.head["model"])
    client.OUTPUT = OUTPUTS[case.head["says"]]
    client.streams.clear()
    if case.head["model"] != "limited":
        return http.Api(client)
    limits = KeyLimits(rest=KeyLimit(best_priority=0, max_waiting=3), has_file=True)
    return http.Api(client, key_limits=limits, request_timeout_s=60.0, api_keys=["k"])


def check(case: Case) -> None:
    with asyncio.Runner() as runner:
        answer, submitted = runner.run(_asked(case))
    must(answer.status < 500 or answer.status == 501, "a server's error:", answer)
    is_post = case.head.get("method", "POST") == "POST"
    if answer.status >= 400:
        _check_error(case, answer)
    elif is_post:
        _check_answer(answer)
    for stream in submitted:
        _check_params(case, stream.ids, stream.params)
    if (path := case.head.get("null")) and is_post:
        _check_null(case, path, (answer.status, [(stream.ids, _compared(stream.params)) for stream in submitted]))


def _check_null(case: Case, path: list[Any], with_null: Any) -> None:
    """A field that is null means the same as one that is absent."""
    value = json.loads(case.payload)
    fields = {name: inner for name, inner in at(value, path[:-1]).items() if name != path[-1]}
    absent = Case(case.head, json.dumps(replaced(value, path[:-1], fields)).encode())
    with asyncio.Runner() as runner:
        answer, submitted = runner.run(_asked(absent))
    without = answer.status, [(stream.ids, _compared(stream.params)) for stream in submitted]
    must(with_null == without, f"null is not absent at {path}:", with_null, "without:", without, answer)


def _compared(params: SamplingParams) -> str:
    return repr(params)


async def _asked(case: Case) -> tuple[Answer, list[http.FakeStream]]:
    api, method = _api(case), case.head.get("method", "POST")
    headers = [("Host", "x"), ("Connection", "close"), ("Content-Type", case.head["type"]), *case.head["headers"]]
    headers.append(("Content-Length", str(len(case.payload))))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers if value.isprintable())
    if case.head["model"] == "limited" and "Authorization" not in lines:
        lines += "Authorization: Bearer k\r\n"
    wire, turns = api.wire(), 0
    wire.feed(f"{method} {case.head['path']} HTTP/1.1\r\n{lines}\r\n".encode(errors="replace") + case.payload)
    try:
        async with asyncio.timeout(60):
            while not (wire.transport.closed or wire.transport.eof_sent):
                await asyncio.sleep(0 if (turns := turns + 1) < 500 else 0.001)
    except TimeoutError:
        raise Finding("there is no answer") from None
    finally:
        for task in list(api.services.state.background.values()):
            task.cancel()
        await api.services.storage.close()
    answers = parse_answers(wire.transport.sent)
    must(len(answers) == 1 and answers[0].complete, "not one complete answer:", wire.transport.sent)
    return answers[0], list(api.client.streams)


# ------------------------------------------------------------------------------------------------------ what must be so
def _check_error(case: Case, answer: Answer) -> None:
    body = json.loads(answer.body)
    error = body["error"] if isinstance(body["error"], dict) else {"message": body["error"]}  # Ollama's
    message, param = error["message"], error.get("param")
    must(isinstance(message, str) and message.strip() and "Traceback" not in message, "an error without a text:", body)
    if answer.status != 400 or error.get("code") in WITHOUT_FIELD or not case.payload.startswith(b"{"):
        return
    if "code" in error:
        must(param, "a refusal that names no field:", body)
    else:
        must(any(name in message for name in _names()), "a refusal that names no field:", body)


def _check_answer(answer: Answer) -> None:
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        events = [block.rpartition("data: ")[2] for block in answer.body.decode().split("\n\n")[:-1]]
        must(events, "a stream without an event")
        for event in events:
            must(event == "[DONE]" or "error" not in (_strict(event) or {}), "an event of an error:", event)
    elif kind.startswith("application/x-ndjson"):
        lines = [_strict(line) for line in answer.body.decode().rstrip("\n").split("\n")]
        must(lines and lines[-1].get("done") is True, "a stream that does not end:", answer.body)
    elif kind.startswith(JSON):
        _strict(answer.body.decode())


def _strict(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise Finding(f"{name} is no JSON: {text[:300]}")

    value = json.loads(text, parse_constant=refuse)
    text.encode()  # no lone surrogates
    return {} if isinstance(value, dict) and value.get("error") is None and value.pop("error", None) else value


def _check_params(case: Case, ids: list[int], params: SamplingParams) -> None:
    """The engine's socket takes what the frontend has accepted; what the core may still refuse, it refuses by a text."""
    data = b"".join((i & 0x7FFFFFFF).to_bytes(4, "little") for i in ids[:50])
    message = _decode(msgspec.msgpack.encode(AddRequest(1, 1, TokenInputs(data), Generate(params))))
    must(isinstance(message, AddRequest) and problem_with(message) is None, "the engine's socket refuses it:", params)
    try:
        check_against(params, vocab_size=300, max_logprobs=20)
    except ValueError as error:
        must(invalid(str(error)).param, "the core's refusal names no field:", error)
    if (wanted := params.structured_outputs) is not None and len(wanted.text) < _LONGEST_GRAMMAR:
        error = _verdict(case.head["model"], wanted)
        must(
            not error or invalid(f"{wanted.name}: {error}" if not error.startswith("tools[") else error).param,
            "no field:",
            error,
        )


@functools.cache
def _trial(model: str) -> Trial:
    return Trial(_client(model).tokenizer.backend.to_str().encode(), 300, [257])


@functools.lru_cache(512)
def _verdict(model: str, wanted: StructuredOutputs) -> str:
    """Why the core would refuse the grammar; empty if it would not."""
    return _trial(model).run(wanted).error


TARGET = Target("bodies", seeds, mutate, check)
