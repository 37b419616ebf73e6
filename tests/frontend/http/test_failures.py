"""What clients see when the engine refuses, fails or shuts down, and what it sees when they are gone or slow."""

import asyncio
import json
import logging

import fake_client as http
import pytest
from fake_client import CHAT, COMPLETIONS, HELLO
from fake_http import settle

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import (
    DeadlineExceeded,
    EngineDown,
    EngineError,
    InvalidRequest,
    Overloaded,
    RateLimited,
    TooLong,
)


def after(error, seconds):
    error.retry_after_s = seconds
    return error


class Panic(BaseException):
    """What a panic in Rust becomes in Python."""


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (InvalidRequest("the prompt holds a token id outside the vocabulary of 300"), 400, "invalid_value", None),
        (TooLong("too long"), 400, "context_length_exceeded", None),
        (Overloaded("full"), 503, "overloaded", "1"),
        (after(Overloaded("full"), 17), 503, "overloaded", "17"),
        (after(RateLimited("this API key has had its 5 tokens a minute"), 9), 429, "rate_limit_exceeded", "9"),
        (DeadlineExceeded("the request's timeout has passed"), 504, "deadline_exceeded", None),
        (EngineDown("gone"), 503, "engine_down", "2"),
        (after(EngineDown("away"), 30), 503, "engine_down", "30"),
        (EngineError("broken"), 500, "engine_error", None),
        (RuntimeError("secret detail"), 500, "internal_error", None),
        (Panic("secret detail"), 500, "internal_error", None),
        (SystemExit(3), 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["submit", "before the first token"])
def test_failures_before_the_first_token_have_a_status(error, status, code, retry, stream, when):
    async def main():
        api = http.Api()
        if when == "submit":
            api.client.submit_error = error
        else:
            api.client.speak = lambda s: s.end(error)
        answer = await api.ask("POST", CHAT, {**HELLO, "stream": stream})
        body = json.loads(answer.body)["error"]
        assert (answer.status, body["code"], answer.headers.get("retry-after")) == (status, code, retry)
        assert "secret" not in body["message"]
        assert answer.headers.get("x-should-retry") == ("false" if status == 504 else None)

    logging.getLogger("quire.http").disabled = True
    asyncio.run(main())
    logging.getLogger("quire.http").disabled = False


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("the prompt holds a token id outside the vocabulary of 300", "prompt"),
        ("a priority other than 0 needs an engine with --scheduling-policy priority", "priority"),
        ("prompt_logprobs must be at most 3, got 4", "prompt_logprobs"),
    ],
)
def test_what_the_engine_refuses_names_the_field(text, param):
    async def main():
        api = http.Api()
        api.client.speak = lambda stream: stream.end(InvalidRequest(text))
        _, answer = await api.json("POST", COMPLETIONS, {"prompt": [999]})
        assert answer["error"]["param"] == param

    asyncio.run(main())


def test_a_failure_within_a_stream_is_its_last_event():
    async def main():
        api = http.Api()

        def speak(stream):
            stream.push(Delta(0, "a", [1], num_tokens=1))
            stream.end(EngineError("boom"))

        api.client.speak = speak
        events = await api.events(CHAT, HELLO)
        assert events[-1] == {
            "error": {"message": "The engine failed while it ran this request.", "type": "server_error", "param": None,
                      "code": "engine_error"}
        }  # fmt: skip
        assert events[1]["choices"][0]["delta"]["content"] == "a"

    asyncio.run(main())


def test_one_failed_prompt_stops_the_others():
    async def main():
        api = http.Api()
        api.client.speak = lambda s: s.end(EngineDown("gone")) if s.id == 1 else None
        for stream in (False, True):
            api.client.streams.clear()
            answer = await api.ask("POST", COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": stream})
            assert answer.status == 503
            assert [s.cancelled for s in api.client.streams] == [True, False, True]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path_and_body", [(CHAT, HELLO), (COMPLETIONS, {"prompt": ["a", "b"]})])
def test_a_gone_client_aborts_its_requests_within_a_turn(path_and_body, stream):
    async def main():
        path, body = path_and_body
        api = http.Api()
        api.client.speak = lambda s: s.push(Delta(0, "a", [1], num_tokens=1))
        wire = api.wire()
        await wire.talk(api.encode("POST", path, {**body, "stream": stream}))
        assert not any(s.cancelled for s in api.client.streams)
        wire.connection.connection_lost(None)
        await asyncio.sleep(0)
        assert all(s.cancelled for s in api.client.streams)
        aborted = (
            f'vllm:request_success_total{{model_name="tiny",engine="0",finished_reason="abort"}} {len(api.client.streams)}.0'
        )
        assert aborted in (await api.ask("GET", "/metrics")).body.decode()

    asyncio.run(main())


def test_a_slow_client_stops_the_pump_and_gets_everything_later():
    async def main():
        api = http.Api()
        api.client.speak = None
        wire = api.wire()
        await wire.talk(api.encode("POST", CHAT, {**HELLO, "stream": True}))
        (stream,) = api.client.streams
        stream.push(Delta(0, "0 ", [1], num_tokens=1))
        await settle()
        wire.connection.pause_writing()
        written = len(wire.transport.sent)
        for i in range(1, 50):
            stream.push(Delta(0, f"{i} ", [1], num_tokens=i + 1))
            await settle(2)
        assert len(wire.transport.sent) < written + 300  # at most the chunk that was under way
        assert len(stream.turns) == 48
        wire.connection.resume_writing()
        stream.push(Delta(0, "", [], None, "stop", None, 50))
        stream.end()
        await settle(300)
        events = http.parse_events(wire.answers()[0].body)
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
        assert text == "".join(f"{i} " for i in range(50))

    asyncio.run(main())


def test_shutdown_ends_a_stream_with_an_error_event():
    async def main():
        api = http.Api()
        api.client.speak = lambda s: s.push(Delta(0, "a", [1], num_tokens=1))
        wire = api.wire()
        await wire.talk(api.encode("POST", CHAT, {**HELLO, "stream": True}))
        await wire.server.shut_down(grace_s=0.01)
        (answer,) = wire.answers()
        assert answer.complete and http.parse_events(answer.body)[-1]["error"]["code"] == "shutting_down"
        assert api.client.streams[0].cancelled

    asyncio.run(main())
