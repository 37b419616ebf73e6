"""/v1/responses: what comes back, whole and streamed, as the openai package's types have it; and how it fails."""

import asyncio
import itertools
import json

import pytest
from fake_client import NUM_TOKENS, FakeClient, make_tokenizer
from fake_http import settle
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from responses_cases import HERMES, RESPONSES, THINKS, both, create, refusal, say, serving, stream

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import EngineError, InvalidRequest, Overloaded
from quire.frontend.http.api.bodies.logprobs import LogprobStyle
from quire.frontend.http.api.output_plan import ParserNames
from quire.frontend.http.api.responses.text_logprobs import TokensOfText

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CLOCK = {"type": "function", "name": "clock"}
TOOLS = {"input": "hi", "tools": [WEATHER, CLOCK]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn ✓"}}\n</tool_call>'
CALLS = f'{CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'
TOKENIZER = make_tokenizer()
LOGPROBS = "message.output_text.logprobs"


def calls_of(answer):
    return [(c["name"], json.loads(c["arguments"])) for c in answer["output"] if c["type"] == "function_call"]


def texts_of(answer):
    return ["".join(part["text"] for part in item["content"]) for item in answer["output"] if item["type"] == "message"]


def test_a_text_whole_and_streamed():
    async def main():
        async with serving() as api:
            answer, events = await both(api, {"input": "hi", "instructions": "be brief", "metadata": {"a": "b"}, "user": "u"})
            assert answer["object"] == "response" and answer["status"] == "completed" and answer["id"].startswith("resp_")
            assert texts_of(answer) == [FakeClient.OUTPUT] and answer["instructions"] == "be brief"
            assert (answer["metadata"], answer["user"], answer["service_tier"]) == ({"a": "b"}, "u", "default")
            usage = answer["usage"]
            assert (usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (NUM_TOKENS, 4)
            assert usage["total_tokens"] == usage["input_tokens"] + NUM_TOKENS
            assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
            deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
            assert deltas == list(FakeClient.OUTPUT)
            assert [e["type"] for e in events if not e["type"].endswith("delta")] == [
                "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
                "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
            ]  # fmt: skip
            assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["usage"] is None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("output", "extra", "texts", "calls"),
    [
        (CALL, {}, [], [("weather", {"city": "Bonn ✓"})]),
        ("Let me see.\n" + CALL, {}, ["Let me see.\n"], [("weather", {"city": "Bonn ✓"})]),
        (CALLS, {}, [], [("weather", {"city": "Bonn ✓"}), ("clock", {})]),
        (CALLS, {"parallel_tool_calls": False}, [], [("weather", {"city": "Bonn ✓"})]),
        (CALL, {"tool_choice": "none"}, [CALL], []),
        ("It is noon.", {"tool_choice": "auto"}, ["It is noon."], []),
        (CALL, {"tool_choice": {"type": "function", "name": "weather"}}, [], [("weather", {"city": "Bonn ✓"})]),
        (CALLS, {"tool_choice": "required"}, [], [("weather", {"city": "Bonn ✓"}), ("clock", {})]),
        ('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
         {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}},
         [], [("clock", {})]),
    ],
)  # fmt: skip
def test_calls(output, extra, texts, calls):
    async def main():
        async with serving(output, HERMES) as api:
            answer, events = await both(api, {**TOOLS, **extra})
            assert (texts_of(answer), calls_of(answer)) == (texts, calls) and answer["status"] == "completed"
            ids = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
            assert len(set(ids)) == len(calls) and all(ids)
            assert answer["tool_choice"] == extra.get("tool_choice", "auto")
            assert [tool["name"] for tool in answer["tools"]] == ["weather", "clock"]
            done = [e for e in events if e["type"] == "response.function_call_arguments.done"]
            assert [(e["name"], json.loads(e["arguments"])) for e in done] == calls

    asyncio.run(main())


def test_thoughts_are_items_of_their_own():
    async def main():
        special = ("<think>", "</think>")
        async with serving(None, THINKS, special) as api:
            say(api, "<think>", "hm", " ✓", "</think>", "Yes.")
            body = {"input": "hi", "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
            answer, events = await both(api, body)
            thought, message = answer["output"]
            assert thought["content"] == [{"type": "reasoning_text", "text": "hm ✓"}] and thought["summary"] == []
            assert message["content"][0]["text"] == "Yes."
            assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 8  # with its tags
            assert "response.reasoning_text.delta" in {e["type"] for e in events}
            sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": thought["encrypted_content"]}
            back = [{"role": "user", "content": "hi"}, sealed, message, {"role": "user", "content": "and?"}]
            await create(api, {"input": back})
            await create(api, {"input": "hi", "reasoning": {"effort": "none"}})
            assert api.client.streams[-1].ids[-2:] == [258, 259]  # thought no more

    asyncio.run(main())


def test_log_probabilities_are_those_of_the_text():
    async def main():
        async with serving(None, THINKS, ("<think>", "</think>")) as api:
            say(api, "<think>", "hm ✓", "</think>Sé", "e", " ✓: <tool", CALL[5:], "</s>")
            answer, events = await both(api, {**TOOLS, "include": [LOGPROBS], "top_logprobs": 2})
            (part,) = next(item for item in answer["output"] if item["type"] == "message")["content"]
            assert bytes(b for row in part["logprobs"] for b in row["bytes"]).decode() == part["text"] == "Sée ✓: "
            assert all(len(row["top_logprobs"]) == 2 and row["logprob"] == -3.0 for row in part["logprobs"])
            deltas = [e for e in events if e["type"] == "response.output_text.delta"]
            assert [row for e in deltas for row in e["logprobs"]] == part["logprobs"]
            (done,) = [e for e in events if e["type"] == "response.output_text.done"]
            assert done["logprobs"] == part["logprobs"]
            bare = await create(api, {**TOOLS, "include": [LOGPROBS]})
            assert bare["output"][1]["content"][0]["logprobs"][0]["top_logprobs"] == []
            await create(api, {**TOOLS, "top_logprobs": -1})
            assert api.client.streams[-1].params.logprobs == api.client.welcome.limits.max_logprobs

    asyncio.run(main())


@given(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 30)), st.lists(st.integers(0, 30)))
def test_every_token_belongs_to_one_piece_of_the_text(text, cuts, turns):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    tokens, taken, start = TokensOfText(TOKENIZER, LogprobStyle(TOKENIZER, 0), frozenset()), [], 0
    bounds, ends = sorted({0, len(text), *(c for c in cuts if c < len(text))}), sorted({len(ids), *turns})
    for end in ends:  # as deltas bring them, ahead of the text or with it
        tokens.add(Delta(0, "", ids[start:end], [{} for _ in ids[start:end]]))
        start = end
    for a, b in itertools.pairwise(bounds):
        taken.append([token_id for _, _, token_id in tokens.take(text[a:b])])
        assert TOKENIZER.decode(taken[-1]) == text[a:b]
    assert [token_id for piece in taken for token_id in piece] == ids


def test_what_is_cut_by_length_is_incomplete():
    def cut(s):
        s.push(Delta(0, "<think>hm", [1, 2], finish_reason=None, num_tokens=2))
        s.push(Delta(0, "", [3], finish_reason="length", num_tokens=3))
        s.end()

    async def main():
        async with serving(template=THINKS) as api:
            api.client.speak = cut
            answer, events = await both(api, {"input": "hi", "max_output_tokens": 3})
            assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
            assert [item["status"] for item in answer["output"]] == ["incomplete"]
            assert events[-1]["type"] == "response.incomplete" and answer["completed_at"] is None

    asyncio.run(main())


def test_an_output_of_nothing_is_an_empty_message():
    async def main():
        async with serving() as api:
            say(api, "</s>")
            answer, _ = await both(api, {"input": "hi"})
            assert texts_of(answer) == [""]

    asyncio.run(main())


def test_formats_become_grammars():
    async def main():
        async with serving("{}") as api:
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            named = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
            for given, kind in [(named, "json"), ({"type": "json_object"}, "json_object"), ({"type": "text"}, None)]:
                answer = await create(api, {"input": "hi", "text": {"format": given, "verbosity": "low"}})
                wanted = api.client.streams[-1].params.structured_outputs
                assert (wanted and wanted.kind) == kind and answer["text"]["verbosity"] == "low"
                assert answer["text"]["format"] == ({**named, "description": None} if given is named else given)
            error = await refusal(api, {"input": "hi", "text": {"format": {"type": "json_schema", "schema": schema}}})
            assert error["param"] == "text.format.name"
            two = {"text": {"format": named}, "structured_outputs": {"regex": "a"}}
            assert (await refusal(api, {"input": "hi", **two}))["param"] == "structured_outputs"

    asyncio.run(main())


def test_fields_of_the_sampler_reach_it():
    async def main():
        async with serving() as api:
            body = {"temperature": 0.5, "top_p": "0.9", "top_k": 3.0, "seed": 7, "max_output_tokens": 9, "stop": ["x"],
                    "logit_bias": {"5": 1}, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True, "priority": 4,
                    "cache_salt": "s", "request_id": "mine"}  # fmt: skip
            answer = await create(api, {"input": "hi", **body})
            p, options = api.client.streams[-1].params, api.client.streams[-1].options
            assert (p.temperature, p.top_p, p.top_k, p.seed, p.max_tokens, p.stop) == (0.5, 0.9, 3, 7, 9, ["x"])
            assert (p.logit_bias, p.repetition_penalty, p.min_tokens, p.ignore_eos) == ({5: 1.0}, 1.5, 2, True)
            assert (options["priority"], options["cache_salt"]) == (4, "s") and answer["id"].startswith("resp_mine_")
            assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.5, 0.9, 9)
            again = await create(api, {"input": "hi", "request_id": "mine"}, {"X-Request-Id": "theirs"})
            assert again["id"].startswith("resp_theirs_")

    asyncio.run(main())


# ----------------------------------------------------------------------------------------------------------------- failing
def test_what_fails_before_the_first_token_has_a_status():
    async def main():
        async with serving() as api:
            api.client.submit_error = Overloaded("full")
            for body in ({"input": "hi"}, {"input": "hi", "stream": True}, {"input": "hi", "background": True}):
                assert (await api.ask("POST", RESPONSES, body)).status == 503
        async with serving() as api:
            api.client.speak = lambda s: s.end(EngineError("a worker died"))
            for body in ({"input": "hi"}, {"input": "hi", "stream": True}):
                assert (await api.ask("POST", RESPONSES, body)).status == 500
            long = await refusal(api, {"input": "x" * 300})
            assert (long["param"], long["code"]) == ("input", "context_length_exceeded")

    asyncio.run(main())


def test_what_fails_later_is_told_by_an_event():
    def fail(s):
        s.push(Delta(0, "Hal", [1, 2, 3], num_tokens=3))
        s.end(EngineError("a worker died"))

    async def main():
        async with serving() as api:
            api.client.speak = fail
            events = await stream(api, {"input": "hi"})
            last = events[-1]
            assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
            assert last["response"]["error"]["code"] == "server_error" and "worker" not in last["response"]["error"]["message"]
            assert last["response"]["output"][0]["content"][0]["text"] == "Hal"
            assert last["response"]["output"][0]["status"] == "incomplete"

    asyncio.run(main())


def test_a_grammar_that_leaves_nothing_fails_the_response():
    def stuck(s):
        s.push(Delta(0, "x", [1], num_tokens=1))
        s.end(InvalidRequest("structured_outputs: nothing that the output may go on with is left"))

    async def main():
        async with serving() as api:
            api.client.speak = stuck
            error = await refusal(api, {"input": "hi"})
            assert error["param"] == "structured_outputs"
            last = (await stream(api, {"input": "hi"}))[-1]
            assert last["type"] == "response.failed" and last["response"]["error"]["message"] == error["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("chats", "ours", "param"),
    [
        ("response_format.json_schema.schema: bad", "text.format.schema: bad.", "text.format"),
        ("tools[0].function.parameters: at #/a: bad", "tools[0].parameters: at #/a: bad.", "tools[0].parameters"),
        ("structured_outputs.regex: bad", "structured_outputs.regex: bad.", "structured_outputs"),
    ],
)
def test_what_the_engine_says_of_a_grammar_names_the_field_that_was_sent(chats, ours, param):
    async def main():
        async with serving() as api:
            api.client.speak = lambda s: s.end(InvalidRequest(chats))
            for extra in ({}, {"stream": True}):
                error = await refusal(api, {"input": "hi", **extra})
                assert (error["message"], error["param"]) == (ours, param)

    asyncio.run(main())


def test_a_server_that_stops_says_so():
    async def main():
        async with serving() as api:
            api.client.speak = lambda s: s.push(Delta(0, "Hal", [1], num_tokens=1))
            wire = api.wire()
            wire.feed(api.encode("POST", RESPONSES, {"input": "hi", "stream": True}))
            await settle()
            wire.connection.cancel()
            await settle()
            (answer,) = wire.answers()
            block = answer.body.decode().split("\n\n")[-2]
            event = json.loads(block.partition("data: ")[2])
            TypeAdapter(ResponseStreamEvent).validate_python(event)
            assert event["type"] == "error" and event["code"] == "shutting_down" and answer.complete
            assert api.client.streams[-1].cancelled

    asyncio.run(main())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_ends_its_request(streamed):
    async def main():
        async with serving() as api:
            api.client.speak = lambda s: s.push(Delta(0, "Hal", [1], num_tokens=1))
            wire = api.wire()
            wire.feed(api.encode("POST", RESPONSES, {"input": "hi", "stream": streamed}))
            await api.client.until(lambda: api.client.streams)
            await settle()
            wire.transport.abort()
            await api.client.until(lambda: api.client.streams[-1].cancelled)

    asyncio.run(main())


def test_tools_need_a_parser_as_in_chats():
    async def main():
        async with serving(parsers=ParserNames(tool_call="none")) as api:
            error = await refusal(api, TOOLS)
            assert error["param"] == "tool_choice" and "--tool-call-parser" in error["message"]

    asyncio.run(main())
