"""POST /v1/messages over the real application: answers in one piece, and streams that must say the same."""

import json

import fake_client as http
import msgspec
import pytest
from anthropic.types import Message, MessageTokensCount
from messages_cases import (
    COUNT,
    HELLO,
    ONE,
    PATH,
    QWEN3,
    SAID,
    THOUGHT,
    TOOLS,
    TWO,
    WEATHER,
    accumulated,
    api_of,
    both,
    chat_of,
    events_of,
    params_of,
    parse_named,
    run,
)  # fmt: skip

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.bodies.checked import RequestDefaults


# ------------------------------------------------------------------------------------------------------------- answers
def test_an_answer_and_a_stream_in_anthropics_shape():
    async def main():
        api = http.Api()
        message = await both(api, HELLO)
        assert [(b.type, b.text) for b in message.content] == [("text", http.FakeClient.OUTPUT)]
        assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "end_turn")
        usage = message.usage
        assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (4, 0)
        assert usage.input_tokens == len(api.client.streams[-1].ids) - 4 and usage.output_tokens == http.NUM_TOKENS
        answer = await api.ask("POST", PATH, HELLO, {"X-Request-Id": "abc", "anthropic-version": "2023-06-01"})
        assert answer.headers["request-id"] == "req_abc" and json.loads(answer.body)["id"] == "msg_abc"

    run(main)


@pytest.mark.parametrize(
    ("output", "extra", "content", "reason"),
    [
        (ONE, {}, [("weather", {"city": "Bonn ✓"})], "tool_use"),
        ("Let me see.\n" + ONE, {}, ["Let me see.\n", ("weather", {"city": "Bonn ✓"})], "tool_use"),
        (TWO, {}, [("weather", {"city": "Bonn ✓"}), ("clock", {})], "tool_use"),
        (TWO + " So.", {}, [("weather", {"city": "Bonn ✓"}), ("clock", {}), " So."], "tool_use"),
        (TWO, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, [("weather", {"city": "Bonn ✓"})],
         "tool_use"),
        (ONE, {"tool_choice": {"type": "none"}}, [ONE], "end_turn"),
        ("It is noon.", {"tool_choice": {"type": "auto"}}, ["It is noon."], "end_turn"),
        (ONE, {"tool_choice": {"type": "tool", "name": "weather"}}, [("weather", {"city": "Bonn ✓"})], "tool_use"),
        (TWO, {"tool_choice": {"type": "any"}}, [("weather", {"city": "Bonn ✓"}), ("clock", {})], "tool_use"),
        ('<tool_call>\n{"name": "clock", "arguments": {"city": "B", "x": [1, 2', {}, [("clock", {"city": "B", "x": [1, 2]})],
         "tool_use"),
        (" \n", {}, [], "end_turn"),
        ("\n Yes", {}, ["\n Yes"], "end_turn"),
    ],
)  # fmt: skip
def test_calls_and_texts_are_blocks(output, extra, content, reason):
    async def main():
        message = await both(api_of(output=output), {**TOOLS, **extra})
        assert [b.text if b.type == "text" else (b.name, b.input) for b in message.content] == content
        assert message.stop_reason == reason

    run(main)


def test_input_streams_as_it_comes():
    async def main():
        events = await events_of(api_of(), TOOLS)
        pieces = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
        assert len(pieces) > 10 and json.loads("".join(pieces)) == {"city": "Bonn ✓"}
        assert events[0]["message"]["content"] == [] and events[1] == {"type": "ping"}

    run(main)


def test_thoughts_are_blocks_with_a_signature():
    async def main():
        api = api_of(QWEN3, THOUGHT + "Yes.", special=("</think>",))
        message = await both(api, HELLO)
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "\nhm\n", "\n\nYes.") and thought.signature
        assert message.usage.output_tokens_details.thinking_tokens > 3
        hidden = await both(api, {**HELLO, "thinking": {"type": "adaptive", "display": "omitted"}})
        assert (hidden.content[0].thinking, hidden.content[0].signature) == ("", thought.signature)
        message = await both(api_of(QWEN3, THOUGHT + ONE), TOOLS)
        assert [b.type for b in message.content] == ["thinking", "tool_use"]
        message = await both(api_of(QWEN3, "<think>for ever"), HELLO)
        assert [b.type for b in message.content] == ["thinking"]

    run(main)


def test_thinking_reaches_the_template_and_the_engine():
    async def main():
        api = api_of(QWEN3, "Yes.", special=("</think>",))
        (end,) = api.client.tokenizer.encode("</think>", add_special_tokens=False)
        status, _ = await api.json("POST", PATH, {**HELLO, "thinking": {"type": "enabled", "budget_tokens": 7}})
        assert status == 200
        assert (params_of(api).thinking_token_budget, params_of(api).reasoning_end_token_ids) == (7, [end])
        await api.json("POST", PATH, {**HELLO, "thinking": {"type": "disabled"}})
        assert chat_of(api).endswith("<think></think>") and params_of(api).thinking_token_budget is None
        await api.json("POST", PATH, {**HELLO, "thinking": {"type": "adaptive"}})
        assert "<think>" not in chat_of(api) and params_of(api).thinking_token_budget is None
        stubborn = api_of("{# </think><think> #}<think>\n", "x</think>Yes.", special=("</think>",))
        await stubborn.json("POST", PATH, {**HELLO, "thinking": {"type": "disabled"}})
        assert params_of(stubborn).thinking_token_budget == 0
        own = api_of(QWEN3, "Yes.", defaults=RequestDefaults(chat_template_kwargs={"enable_thinking": False}))
        await own.json("POST", PATH, {**HELLO, "thinking": {"type": "adaptive"}})
        assert "<think>" not in chat_of(own)  # the request goes before the operator
        await own.json("POST", PATH, HELLO)
        assert chat_of(own).endswith("<think></think>")

    run(main)


def ending(reason, stop_reason=None):
    def speak(stream):
        stream.push(Delta(0, "One", [5], None, reason, stop_reason, 1))
        stream.end()

    return speak


@pytest.mark.parametrize(
    ("end", "extra", "stop"),
    [
        (("stop",), {}, ("end_turn", None)),
        (("length",), {}, ("max_tokens", None)),
        (("length",), {"max_tokens": 100_000}, ("model_context_window_exceeded", None)),
        (("stop", "two"), {"stop_sequences": ["two"]}, ("stop_sequence", "two")),
        (("stop", 7), {"stop_sequences": ["two"]}, ("end_turn", None)),
    ],
)
def test_reasons_to_stop(end, extra, stop):
    async def main():
        api = http.Api()
        api.client.speak = ending(*end)
        message = await both(api, {**HELLO, **extra})
        assert (message.stop_reason, message.stop_sequence) == stop
        assert params_of(api).stop == extra.get("stop_sequences")
        assert params_of(api).max_tokens == min(extra.get("max_tokens", 60), 200 - len(api.client.streams[-1].ids))

    run(main)


def test_sampling_and_format_reach_the_engine():
    async def main():
        api = http.Api()
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        extra = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "cache_salt": "s", "priority": 2, "vllm_xargs": {"a": 1}}
        for name in ("output_config", "output_format"):
            form = {"type": "json_schema", "schema": schema}
            form = {"format": form, "effort": "max"} if name == "output_config" else form
            status, answer = await api.json("POST", PATH, {**HELLO, **extra, name: form})
            assert status == 200, answer
            params, options = params_of(api), api.client.streams[-1].options
            assert (params.temperature, params.top_p, params.top_k, params.extra_args) == (0.5, 0.25, 3, {"a": 1})
            assert params.structured_outputs.kind == "json" and json.loads(params.structured_outputs.text) == schema
            assert (options["cache_salt"], options["priority"]) == ("s", 2)
        effort = api_of("{{ reasoning_effort }}")
        await effort.json("POST", PATH, {**HELLO, "output_config": {"effort": "xhigh"}})
        assert chat_of(effort) == "high"

    run(main)


def test_a_request_for_no_tokens_fills_the_cache():
    async def main():
        api = http.Api()
        status, answer = await api.json("POST", PATH, {**HELLO, "max_tokens": 0})
        message = Message.model_validate(answer)
        assert status == 200 and message.content == [] and message.stop_reason == "max_tokens"
        assert message.usage.output_tokens == 0 and params_of(api).max_tokens == 1
        assert (await api.json("POST", PATH, {**HELLO, "max_tokens": 0, "stream": True}))[0] == 400

    run(main)


def test_tokens_are_counted_as_they_are_used():
    async def main():
        api = api_of()
        bodies = ({**SAID, "system": "Be brief."}, {**SAID, "tools": [WEATHER]}, {**SAID, "thinking": {"type": "adaptive"}})
        for body in bodies:
            status, counted = await api.json("POST", COUNT, {"model": "tiny", **body})
            message = await both(api, {**HELLO, **body})
            usage = message.usage
            assert status == 200 and MessageTokensCount.model_validate(counted, strict=True)
            assert counted["input_tokens"] == usage.input_tokens + usage.cache_read_input_tokens
        assert len(api.client.streams) == 2 * len(bodies)

    run(main)


def test_system_messages_amid_a_conversation_suit_every_template():
    strict = http.TEMPLATE.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}",
    )
    body = {**HELLO, "system": "S", "messages": [
        {"role": "user", "content": "a"}, {"role": "system", "content": "now"}, {"role": "user", "content": "b"}]}  # fmt: skip

    async def main():
        api = api_of(output="x")
        await api.json("POST", PATH, body)
        assert chat_of(api) == "<system>S<user>a<system>now<user>b<assistant>"
        api = api_of(strict, output="x")
        assert (await api.json("POST", PATH, body))[0] == 200
        assert chat_of(api) == "<system>S<user>a\n<system>\nnow\n</system>\nb<assistant>"
        refuses = api_of("{{ raise_exception('never') }}")
        for messages in (body["messages"], SAID["messages"]):
            status, answer = await refuses.json("POST", PATH, {**HELLO, "messages": messages})
            assert status == 400 and "never" in answer["error"]["message"]

    run(main)


CLAUDE_CODE = {
    "model": "tiny",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=00000;"},
        {"type": "text", "text": "You are a CLI.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nbe kind\n</system-reminder>"},
                                     {"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "EqQ="},
                                          {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bonn"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain", "is_error": False}]},
    ],
    "tools": [{"name": "weather", "description": "W.", "eager_input_streaming": True, "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
        "properties": {"city": {"type": "string"}}, "additionalProperties": False}}],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "user_x_account__session_y"},
}  # fmt: skip


def test_claude_codes_requests_are_taken():
    async def main():
        api = api_of(output=ONE)
        limits = msgspec.structs.replace(api.client.welcome.limits, max_model_len=2000)
        api.client.welcome = msgspec.structs.replace(api.client.welcome, limits=limits)
        headers = {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27", "anthropic-version": "2023-06-01",
                   "x-app": "cli"}  # fmt: skip
        answer = await api.ask("POST", f"{PATH}?beta=true", CLAUDE_CODE, headers)
        assert answer.status == 200 and accumulated(parse_named(answer.body)).content[0].input == {"city": "Bonn ✓"}
        prompt = chat_of(api)
        assert "billing" not in prompt and "You are a CLI." in prompt and "<tool>rain" in prompt
        counted = {k: v for k, v in CLAUDE_CODE.items() if k in ("model", "messages", "system", "tools", "thinking")}
        assert (await api.json("POST", f"{COUNT}?beta=true", counted))[1]["input_tokens"] == len(api.client.streams[0].ids)

    run(main)


def test_strict_tools_have_a_grammar():
    async def main():
        api = api_of()
        await api.json("POST", PATH, {**HELLO, "tools": [{**WEATHER, "strict": True}]})
        assert params_of(api).structured_outputs is not None
        await api.json("POST", PATH, TOOLS)
        assert params_of(api).structured_outputs is None

    run(main)
