"""Tools and reasoning through the chat route: what reaches the engine, and what comes back, in one piece and streamed."""

import asyncio
import json

import fake_client as http
import pytest
from chat_tools import CLOCK, HERMES, NAMED, ONE, TOOLS, TWO, WEATHER, api_of, both, check_calls, params_of
from fake_client import CHAT, HELLO
from tool_cases import FORMATS

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.output_plan import ParserNames

QWEN3 = (
    HERMES
    + "{# <think></think> #}{% if enable_thinking is false %}<think></think>{% endif %}{% if opens %}<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("output", "extra", "content", "calls", "reason"),
    [
        (ONE, {}, None, [("weather", {"city": "Bonn ✓"})], "tool_calls"),
        ("Let me see.\n" + ONE, {}, "Let me see.\n", [("weather", {"city": "Bonn ✓"})], "tool_calls"),
        (TWO, {}, None, [("weather", {"city": "Bonn ✓"}), ("clock", {})], "tool_calls"),
        (TWO, {"parallel_tool_calls": False}, None, [("weather", {"city": "Bonn ✓"})], "tool_calls"),
        (ONE, {"tool_choice": "none"}, ONE, [], "stop"),
        ("It is noon.", {"tool_choice": "auto"}, "It is noon.", [], "stop"),
        ("<tool_call>oops</tool_call>", {}, "<tool_call>oops</tool_call>", [], "stop"),
        (ONE, {"tool_choice": NAMED}, None, [("weather", {"city": "Bonn ✓"})], "tool_calls"),
        (TWO, {"tool_choice": "required"}, None, [("weather", {"city": "Bonn ✓"}), ("clock", {})], "tool_calls"),
        (ONE + '\n<tool_call>\n{"nam', {"tool_choice": "required"}, None, [("weather", {"city": "Bonn ✓"})], "tool_calls"),
        ('<tool_call>\n{"name": "weather"', {"tool_choice": NAMED}, None, [], "stop"),  # cut off: nothing to show
        ("<tool_c", {"tool_choice": "required"}, None, [], "stop"),
    ],
)  # fmt: skip
def test_calls(output, extra, content, calls, reason):
    asyncio.run(check_calls(api_of(output=output), extra, content, calls, reason))


def test_arguments_stream_as_they_come():
    async def main():
        events = await api_of().events(CHAT, TOOLS)
        pieces = [c["function"] for e in events[:-1] for c in e["choices"][0]["delta"].get("tool_calls", [])]
        assert pieces[0] == {"name": "weather", "arguments": ""} and len(pieces) > 10
        assert "".join(p["arguments"] for p in pieces) == '{"city": "Bonn ✓"}'
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}

    asyncio.run(main())


def test_strict_functions_become_a_structural_tag():
    async def main():
        api = api_of()
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
        await api.json("POST", CHAT, {**HELLO, "tools": [strict, CLOCK]})
        grammar = params_of(api).structured_outputs
        whole = json.loads(grammar.text)
        tag, arguments = whole["format"], whole["definitions"]
        assert grammar.kind == "structural_tag" and grammar.field == "tools" and tag["triggers"] == ["<tool_call>"]
        assert tag["tags"][0]["begin"] == '<tool_call>\n{"name": "weather", "arguments": '
        comment = {"$comment": "tools[0].function.parameters"}
        assert arguments["weather"]["json_schema"] == {**comment, **WEATHER["function"]["parameters"]}
        assert arguments["clock"]["json_schema"]["type"] == "object"
        for name in FORMATS:
            api = api_of(parsers=ParserNames(name))
            await api.json("POST", CHAT, {**HELLO, "tools": [strict, CLOCK]})
            assert "City" in params_of(api).structured_outputs.text
            await api.json("POST", CHAT, {**HELLO, "tools": [WEATHER, CLOCK]})
            assert params_of(api).structured_outputs is None
        strict["function"]["name"] = "3d"
        status, answer = await api_of(parsers=ParserNames("pythonic")).json("POST", CHAT, {**HELLO, "tools": [strict]})
        assert status == 400 and answer["error"]["param"] == "tools[0].function.name"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "param"),
    [
        ("response_format.json_schema.schema: at #/properties/a: oops", "response_format"),
        ("guided_regex: oops at temperature", "guided_regex"),
        ("structured_outputs.grammar: oops", "structured_outputs"),
        ("structured_outputs (json): oops", "structured_outputs"),
        ("tools: oops", "tools"),
        ("tools[1].function.parameters: at #/items: oops", "tools[1].function.parameters"),
        ("temperature must be: oops", "temperature"),
    ],
)
def test_an_error_about_a_grammar_names_its_field(error, param):
    assert invalid(error).param == param


BIG = {"type": "function", "function": {"name": "big", "parameters": {"type": "object", "description": "x" * 300_000}}}
DEEP = {}
for _ in range(400):
    DEEP = {"properties": {"a": DEEP}}
REFUSED = [
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "function"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "name"),
    ({"tools": [CLOCK, {"type": "function", "function": {"name": "a b"}}]}, "tools[1].function.name", "1 to 128"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name", "1 to 128"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "1 to 128"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name", "two functions"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters", "object"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters", "object"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict", "true"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools[0].function.description", "text"),
    ({"tools": [BIG]}, "tools", "256 KiB"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
    ({"tool_choice": "always"}, "tool_choice", "must be"), ({"tool_choice": 5}, "tool_choice", "must be"),
    *(({"tool_choice": nothing, "tools": None}, "tool_choice", "must be") for nothing in (0, "", [], {}, False)),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "must be"),
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice.function.name", "no function"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice", "allowed_tools"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", ""),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"), ({"function_call": {"name": "f"}}, "function_call", "use"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "--reasoning-parser"),
    ({"thinking_token_budget": "many"}, "thinking_token_budget", ""),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "param", "text"), REFUSED, ids=[json.dumps(e)[:50] for e, _, _ in REFUSED])
def test_wrong_tools_get_400(extra, param, text):
    async def main():
        for stream in (False, True):
            status, answer = await api_of().json("POST", CHAT, {**TOOLS, **extra, "stream": stream})
            assert status == 400 and answer["error"]["param"] == param and text in answer["error"]["message"], answer

    asyncio.run(main())


def test_tokenize_bounds_tools_alike():
    async def main():
        status, answer = await api_of().json("POST", "/tokenize", {**HELLO, "tools": [BIG]})
        assert status == 400 and answer["error"]["param"] == "tools"

    asyncio.run(main())


def test_deep_schemas_end_with_an_answer():
    async def main():
        deep = {"type": "function", "function": {"name": "f", "parameters": DEEP}}
        for choice in ("auto", "required"):
            status, _ = await api_of(output="x").json("POST", CHAT, {**HELLO, "tools": [deep], "tool_choice": choice})
            assert status in (200, 400)

    asyncio.run(main())


def test_auto_needs_a_parser():
    async def main():
        for names in (ParserNames(), ParserNames("none")):
            api = api_of(http.TEMPLATE if names.tool_call == "auto" else HERMES, parsers=names)
            status, answer = await api.json("POST", CHAT, TOOLS)
            assert status == 400 and "--tool-call-parser" in answer["error"]["message"]
            assert (await api.json("POST", CHAT, {**TOOLS, "tool_choice": "none"}))[0] == 200
            assert (await api.json("POST", CHAT, {**TOOLS, "tool_choice": "required"}))[0] == 200
        status, answer = await api_of(http.TEMPLATE, parsers=ParserNames("hermes")).json("POST", CHAT, TOOLS)
        assert status == 200 and answer["choices"][0]["message"]["tool_calls"]

    asyncio.run(main())


THOUGHT = "<think>\nhm\n</think>\n\n"


def test_reasoning_is_apart():
    async def main():
        choice, events = await both(api_of(QWEN3, THOUGHT + "Yes."), HELLO)
        message = choice["message"]
        assert message["reasoning"] == message["reasoning_content"] == "\nhm\n" and message["content"] == "\n\nYes."
        deltas = [e["choices"][0]["delta"] for e in events[1:-1]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "\nhm\n"
        choice, _ = await both(api_of(QWEN3, THOUGHT + ONE), TOOLS)
        assert choice["message"]["content"] is None and choice["message"]["tool_calls"] and choice["message"]["reasoning"]
        choice, events = await both(api_of(QWEN3, THOUGHT + "Yes."), {**HELLO, "include_reasoning": False})
        assert "reasoning" not in choice["message"] and choice["message"]["content"] == "\n\nYes."
        assert not any("reasoning" in e["choices"][0]["delta"] for e in events[:-1])
        choice, _ = await both(api_of(QWEN3, "Yes <think>"), {**HELLO, "chat_template_kwargs": {"enable_thinking": False}})
        assert choice["message"]["content"] == "Yes <think>" and choice["message"]["reasoning"] is None
        choice, _ = await both(api_of(QWEN3, "Yes <think>"), {**HELLO, "reasoning_effort": "none"})
        assert choice["message"]["content"] == "Yes <think>"
        choice, _ = await both(api_of(QWEN3, "hm</think>Yes"), {**HELLO, "chat_template_kwargs": {"opens": True}})
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "Yes")
        choice, _ = await both(api_of(QWEN3, THOUGHT + "Yes.", parsers=ParserNames(reasoning="none")), HELLO)
        assert choice["message"]["content"] == THOUGHT + "Yes." and "reasoning" not in choice["message"]
        choice, _ = await both(api_of(http.TEMPLATE, "hm</think>Yes", parsers=ParserNames(reasoning="deepseek_r1")), HELLO)
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "Yes")

    asyncio.run(main())


def test_grammars_wait_for_the_end_of_thoughts():
    async def main():
        api = api_of(QWEN3, "x", special=("</think>",))
        (end,) = api.client.tokenizer.encode("</think>", add_special_tokens=False)
        await api.json("POST", CHAT, {**TOOLS, "tool_choice": "required"})
        assert params_of(api).reasoning_end_token_ids == [end]
        await api.json("POST", CHAT, {**HELLO, "thinking_token_budget": 7})
        assert (params_of(api).thinking_token_budget, params_of(api).reasoning_end_token_ids) == (7, [end])
        await api.json("POST", CHAT, {**HELLO, "chat_template_kwargs": {"thinking_token_budget": 8}})
        assert params_of(api).thinking_token_budget == 8
        await api.json("POST", CHAT, HELLO)
        assert params_of(api).reasoning_end_token_ids is None
        other = QWEN3.replace("enable_thinking", "some_switch")  # it may think, or not: a grammar must not wait for that
        for names, ends in ((ParserNames(), None), (ParserNames(reasoning="qwen3"), [end])):
            unsure = api_of(other, "x", special=("</think>",), parsers=names)
            await unsure.json("POST", CHAT, {**TOOLS, "tool_choice": "required"})
            assert params_of(unsure).reasoning_end_token_ids == ends
        tells = api_of(other, "x", special=("<think>", "</think>"))  # one token begins a thought: where it does, it waits
        start, end_too = (tells.client.tokenizer.backend.token_to_id(text) for text in ("<think>", "</think>"))
        await tells.json("POST", CHAT, {**TOOLS, "tool_choice": "required"})
        sent = params_of(tells)
        assert (sent.reasoning_start_token_ids, sent.reasoning_end_token_ids) == ([start], [end_too])
        await tells.json("POST", CHAT, {**HELLO, "thinking_token_budget": 3, "chat_template_kwargs": {"opens": True}})
        assert params_of(tells).reasoning_start_token_ids is None and params_of(tells).thinking_token_budget == 3
        off = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_token_budget": 3}
        await api.json("POST", CHAT, {**TOOLS, **off, "tool_choice": "required"})
        assert params_of(api).reasoning_end_token_ids is params_of(api).thinking_token_budget is None
        assert params_of(api).structured_outputs is not None
        status, answer = await api.json("POST", CHAT, {**HELLO, "thinking_token_budget": -2})
        assert status == 400 and answer["error"]["param"] == "thinking_token_budget"

    asyncio.run(main())


def test_markers_that_are_special_tokens_are_shown():
    async def main():
        api = api_of(QWEN3, "x", special=("<tool_call>", "</think>", "<|x|>"))
        id_of = api.client.tokenizer.backend.token_to_id
        await api.json("POST", CHAT, TOOLS)
        assert api.client.streams[-1].shown == {id_of("<tool_call>"), id_of("</think>")}
        await api.json("POST", CHAT, HELLO)
        assert api.client.streams[-1].shown == {id_of("</think>")}
        await (plain := api_of(special=("<tool_call>",))).json("POST", CHAT, HELLO)
        assert plain.client.streams[-1].shown == set()

    asyncio.run(main())


def test_logprobs_and_token_ids_beside_calls():
    async def main():
        api = api_of(QWEN3, THOUGHT + ONE, special=("</think>",))
        api.client.speak = lambda stream: by_token(api.client, stream)
        extra = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "stream_options": {"include_usage": True}}
        body = {**TOOLS, **extra}
        del body["stream_options"]
        _, answer = await api.json("POST", CHAT, body)
        events = await api.events(CHAT, {**TOOLS, **extra})
        choice = answer["choices"][0]
        ids = [i for e in events[:-2] for i in e["choices"][0].get("token_ids", [])]
        rows = [r for e in events[:-2] if (part := e["choices"][0]["logprobs"]) for r in part["content"]]
        assert ids == choice["token_ids"] and rows == choice["logprobs"]["content"] and len(rows) == len(ids)
        end = api.client.tokenizer.backend.token_to_id("</think>")
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": ids.index(end) + 1}
        assert events[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": ids.index(end) + 1}

    asyncio.run(main())


def by_token(client, stream):
    """OUTPUT, a turn a token."""
    ids = client.tokenizer.encode(client.OUTPUT, add_special_tokens=False)
    texts, done = [], b""
    for i in ids:
        done += client.tokenizer.token_bytes(i)
        text = done.decode(errors="ignore")
        texts.append(text[sum(map(len, texts)) :])
    for count, (i, text) in enumerate(zip(ids, texts, strict=True), 1):
        rows = None if stream.params.logprobs is None else [client.row(i, 1)]
        end = "stop" if count == len(ids) else None
        stream.push(Delta(0, text, [i], rows, end, None, count))
    stream.end()
