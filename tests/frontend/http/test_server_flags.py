"""What `quire serve`'s flags do to requests and answers: defaults, pages' methods and headers, names, the access log."""

import asyncio
import logging

import fake_client as http
from fake_client import CHAT, COMPLETIONS, HELLO

from quire.frontend.http.api.bodies.checked import RequestDefaults
from quire.frontend.http.api.logs.access_log import AccessLog
from quire.frontend.http.api.output_plan import ParserNames
from quire.frontend.http.protocol.cors import Cors
from quire.frontend.http.protocol.exchange import Request

PAGE = {"Origin": "https://page"}
PREFLIGHT = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def test_chats_answer_in_the_role_that_was_asked_for():
    async def main():
        api = http.Api(defaults=RequestDefaults(response_role="bot"))
        _, answer = await api.json("POST", CHAT, HELLO)
        assert answer["choices"][0]["message"]["role"] == "bot"
        events = await api.events(CHAT, HELLO)
        assert events[0]["choices"][0]["delta"]["role"] == "bot"
        going_on = {
            "messages": [{"role": "user", "content": "a"}, {"role": "me", "content": "I"}],
            "continue_final_message": True,
        }
        _, answer = await api.json("POST", CHAT, going_on)
        assert answer["choices"][0]["message"]["role"] == "me"

    asyncio.run(main())


def test_answers_with_calls_have_that_role_too():
    async def main():
        api = http.Api(defaults=RequestDefaults(response_role="bot"), parsers=ParserNames("hermes", "none"))
        body = {**HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}
        api.client.OUTPUT = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        _, answer = await api.json("POST", CHAT, body)
        message = answer["choices"][0]["message"]
        assert message["role"] == "bot" and message["tool_calls"][0]["function"]["name"] == "f"
        events = await api.events(CHAT, body)
        assert events[0]["choices"][0]["delta"] == {"role": "bot", "content": None}

    asyncio.run(main())


def test_requests_have_the_defaults_they_leave_out():
    defaults = RequestDefaults(chat_template_kwargs={"a": 1, "b": 2}, return_tokens_as_token_ids=True, include_usage=True)

    async def main():
        api = http.Api(defaults=defaults)
        for path, body in ((CHAT, {**HELLO, "logprobs": True}), (COMPLETIONS, {"prompt": "a", "logprobs": 1})):
            _, answer = await api.json("POST", path, body)
            assert "token_id:" in str(answer["choices"][0]["logprobs"])
            _, answer = await api.json("POST", path, {**body, "return_tokens_as_token_ids": False})
            assert "token_id:" not in str(answer["choices"][0]["logprobs"])
            events = await api.events(path, {**body, "stream_options": {"include_usage": False}})
            assert events[-2]["usage"]["completion_tokens"] > 0 and events[-2]["choices"] == []
            assert all(event["usage"]["prompt_tokens"] for event in events[:-1])
        events = await api.events("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}})
        assert events[-2]["usage"]["completion_tokens"] > 0 and events[-2]["choices"] == []
        said = http.Api(http.FakeClient(template="{{ a }}{{ b }}"), defaults=defaults)
        body = {**HELLO, "chat_template_kwargs": {"b": 3}}
        _, answer = await said.json("POST", "/tokenize", body)
        assert answer["tokens"] == said.client.tokenizer.encode("13", add_special_tokens=False)

    asyncio.run(main())
    body = http_body(chat_template_kwargs={"b": 3})
    defaults.fill(body)
    assert body.chat_template_kwargs == {"a": 1, "b": 3}


def http_body(**fields):
    from quire.frontend.http.api.bodies.schemas import ChatRequest

    return ChatRequest(messages=[{"role": "user", "content": "x"}], **fields)


def test_what_pages_may_send_is_the_operators_to_say():
    async def main():
        api = http.Api(cors=Cors(["https://page"], ["post"], ["X-One", "X-Two"], allow_credentials=True))
        headers = (await api.ask("OPTIONS", CHAT, headers=PREFLIGHT)).headers
        assert headers["access-control-allow-methods"] == "POST" and headers["access-control-allow-headers"] == "X-One, X-Two"
        assert headers["access-control-allow-origin"] == "https://page" and headers["vary"] == "origin"
        assert headers["access-control-allow-credentials"] == "true"
        answer = await api.ask("GET", "/v1/models", headers={"Origin": "https://other"})
        assert "access-control-allow-credentials" not in answer.headers
        everyone = http.Api(cors=Cors(allow_credentials=True))  # a browser takes no "*" with credentials
        assert (await everyone.ask("GET", "/v1/models", headers=PAGE)).headers["access-control-allow-origin"] == "https://page"

    asyncio.run(main())


def test_every_answer_may_have_a_name():
    async def main():
        api = http.Api(request_ids=True)
        answer = await api.ask("POST", CHAT, HELLO)
        name = answer.headers["x-request-id"]
        assert len(name) == 32 and f"chatcmpl-{name}".encode() in answer.body
        assert (await api.ask("GET", "/health", headers={"X-Request-Id": "mine"})).headers["x-request-id"] == "mine"
        assert "x-request-id" not in (await http.Api().ask("GET", "/health")).headers

    asyncio.run(main())


def test_the_access_log_has_a_line_for_each_request(caplog):
    log = AccessLog(["/health"])

    async def main():
        api = http.Api(access_log=log, api_keys=["k"])
        key = {"Authorization": "Bearer k"}
        for method, path, body, headers in (
            ("POST", CHAT, HELLO, key), ("GET", "/health", None, {}), ("GET", "/v1/models?secret=1", None, key),
            ("GET", "/nope", None, key), ("GET", "/v1/models", None, {}),
        ):  # fmt: skip
            await api.ask(method, path, body, headers)
        assert not caplog.messages  # written by a thread, when there is time

    with caplog.at_level(logging.INFO, "quire.access"):
        asyncio.run(main())
        log.flush()
    lines = [line.split('"', 1)[1].rsplit(" ", 2)[0] for line in caplog.messages]
    assert sorted(lines) == sorted([f'POST {CHAT}" 200', 'GET /v1/models" 200', 'GET /nope" 404', 'GET /v1/models" 401'])
    assert "secret" not in caplog.text


def test_lines_of_the_access_log(caplog):
    log, request = AccessLog(), Request()
    request.method, request.path = "GET", b"/\xff\x01"

    async def main():
        for request.peer in (("127.0.0.1", 5), ("::1", 6, 0, 0), None, ""):
            log.add(request, 0, 0.25)

    with caplog.at_level(logging.INFO, "quire.access"):
        asyncio.run(main())
        log.flush()
        log.flush()
    hosts = ["127.0.0.1:5", "[::1]:6", "-", "-"]
    assert caplog.messages == [f'{host} "GET /\\xff\x01" - 0.250 s' for host in hosts]
