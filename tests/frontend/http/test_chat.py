"""/v1/chat/completions over a fake wire, with a scripted client: shapes, streams, logprobs."""

import asyncio

import fake_client as http
import msgspec
from fake_client import CHAT, COMPLETIONS, HELLO, NUM_TOKENS
from fake_http import settle

from quire.frontend.client.outputs import Delta


def test_chat_answers_in_openai_shape():
    async def main():
        api = http.Api()
        status, body = await api.json("POST", CHAT, HELLO)
        assert status == 200
        assert body.pop("id").startswith("chatcmpl-") and body.pop("created") > 1.7e9
        usage = {"prompt_tokens": 19, "completion_tokens": NUM_TOKENS, "total_tokens": 19 + NUM_TOKENS}
        assert body == {
            "object": "chat.completion",
            "model": "tiny",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": api.client.OUTPUT, "refusal": None, "tool_calls": []},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ],
            "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 4}},
            "prompt_logprobs": None,
        }
        (stream,) = api.client.streams
        assert api.client.tokenizer.decode(stream.ids) == "<user>hi<assistant>"
        assert stream.params.max_tokens is None

    asyncio.run(main())


def test_chat_stream_is_role_text_finish_usage_done():
    async def main():
        api = http.Api()
        events = await api.events(CHAT, {**HELLO, "stream_options": {"include_usage": True}})
        assert events.pop() == "[DONE]"
        usage = events.pop()
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == NUM_TOKENS
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        assert all(e["usage"] is None and e["object"] == "chat.completion.chunk" for e in events)
        assert len({(e["id"], e["created"], e["model"]) for e in events}) == 1
        choices = [e["choices"][0] for e in events]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        assert "".join(c["delta"]["content"] for c in choices[:-1]) == api.client.OUTPUT
        assert all(c["finish_reason"] is None for c in choices[:-1])

    asyncio.run(main())


def test_a_stream_writes_once_per_turn_and_its_head_with_the_first_text():
    async def main():
        api = http.Api()
        api.client.speak = None
        wire = api.wire()
        await wire.talk(api.encode("POST", CHAT, {**HELLO, "stream": True, "n": 2}))
        (stream,) = api.client.streams
        assert wire.transport.num_writes == 0
        stream.push(Delta(0, "a", [1], num_tokens=1), Delta(1, "b", [2], num_tokens=1))
        await settle()
        assert wire.transport.num_writes == 1
        stream.push(Delta(0, "c", [1], num_tokens=2), Delta(1, "", [2], num_tokens=2))
        await settle()
        assert wire.transport.num_writes == 2
        stream.push(Delta(0, "", [1], num_tokens=3))  # held back: nothing to say
        await settle()
        assert wire.transport.num_writes == 2
        stream.push(Delta(0, "d", [1], None, "length", None, 4), Delta(1, "", [], None, "stop", "X", 2))
        stream.end()
        await settle()
        choices = [e["choices"][0] for e in http.parse_events(wire.answers()[0].body)[:-1]]
        texts = ["".join(c["delta"].get("content", "") for c in choices if c["index"] == i) for i in (0, 1)]
        ends = {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]}
        assert texts == ["acd", "b"] and ends == {0: ("length", None), 1: ("stop", "X")}

    asyncio.run(main())


def test_chat_logprobs_stream_and_whole_are_equal():
    async def main():
        api = http.Api()
        body = {**HELLO, "logprobs": True, "top_logprobs": 2}
        _, whole = await api.json("POST", CHAT, body)
        content = whole["choices"][0]["logprobs"]["content"]
        assert len(content) == NUM_TOKENS
        first = content[0]
        token = api.client.tokenizer.token_str
        assert first["token"] == "G" and first["logprob"] == -3.0 and first["bytes"] == [71]
        assert [t["token"] for t in first["top_logprobs"]] == [token(10), token(11)]  # the third is not among the best two
        assert bytes(b for c in content for b in c["bytes"]).decode() == api.client.OUTPUT
        events = await api.events(CHAT, body)
        streamed = [c for e in events[:-1] if (lp := e["choices"][0]["logprobs"]) for c in lp["content"]]
        assert streamed == content
        _, none = await api.json("POST", CHAT, {**HELLO, "logprobs": True})
        assert none["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        _, ids = await api.json("POST", CHAT, {**body, "return_tokens_as_token_ids": True})
        assert ids["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["token"] == "token_id:10"

    asyncio.run(main())


def test_a_server_may_allow_fewer_logprobs():
    async def main():
        api = http.Api()
        welcome = api.client.welcome
        api.client.welcome = msgspec.structs.replace(welcome, limits=msgspec.structs.replace(welcome.limits, max_logprobs=3))
        status, answer = await api.json("POST", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 4})
        assert status == 400 and answer["error"]["param"] == "top_logprobs" and "at most 3" in answer["error"]["message"]
        _, three = await api.json("POST", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 3})
        status, answer = await api.json("POST", CHAT, {**HELLO, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1})
        assert status == 200 and api.client.streams[-1].params.logprobs == 3
        assert answer["choices"][0]["logprobs"] == three["choices"][0]["logprobs"]
        status, answer = await api.json("POST", CHAT, {**HELLO, "top_logprobs": -1})
        assert status == 400 and answer["error"]["message"] == "top_logprobs needs logprobs: true."

    asyncio.run(main())


def test_impossible_tokens_are_sent_as_a_number():
    async def main():
        _, whole = await http.Api().json("POST", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 5})
        assert whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"][-1]["logprob"] == -9999.0

    asyncio.run(main())


def test_chat_extras_reach_the_template():
    async def main():
        api = http.Api()
        decode = api.client.tokenizer.decode
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        other = {"type": "function", "function": {"name": "g"}}
        cases = [
            ({"tools": [tool, other], "tool_choice": "required"}, "<user>hi[2 tools]<assistant>"),
            ({"tools": [tool, other], "tool_choice": "none"}, "<user>hi<assistant>"),
            ({"chat_template_kwargs": {"shout": True}}, "<user>hi!<assistant>"),
            ({"add_generation_prompt": False}, "<user>hi"),
            ({"messages": [*HELLO["messages"], {"role": "assistant", "content": "yo"}], "continue_final_message": True,
              "add_generation_prompt": False}, "<user>hi<assistant>yo"),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
             "<user>a\nb<assistant>"),
        ]  # fmt: skip
        for extra, expected in cases:
            status, _ = await api.json("POST", CHAT, {**HELLO, **extra})
            assert status == 200 and decode(api.client.streams[-1].ids) == expected, extra

    asyncio.run(main())


def test_return_token_ids():
    async def main():
        api = http.Api()
        _, whole = await api.json("POST", CHAT, {**HELLO, "return_token_ids": True})
        (stream,) = api.client.streams
        ids = whole["choices"][0]["token_ids"]
        assert whole["prompt_token_ids"] == stream.ids and api.client.tokenizer.decode(ids) == api.client.OUTPUT
        events = await api.events(CHAT, {**HELLO, "return_token_ids": True})
        assert events[0]["prompt_token_ids"] == stream.ids
        assert [i for e in events[:-1] for i in e["choices"][0].get("token_ids", [])] == ids
        _, whole = await api.json("POST", COMPLETIONS, {"prompt": [5, 6], "return_token_ids": True})
        assert whole["choices"][0]["prompt_token_ids"] == [5, 6] and whole["choices"][0]["token_ids"] == ids
        events = await api.events(COMPLETIONS, {"prompt": [5, 6], "return_token_ids": True})
        assert events[0]["choices"][0]["prompt_token_ids"] == [5, 6]
        assert [i for e in events[:-1] for i in e["choices"][0]["token_ids"]] == ids
        events = await api.events(CHAT, {**HELLO, "return_token_ids": True})
        assert [i for e in events[1:-1] for i in e["choices"][0]["token_ids"]] == ids

    asyncio.run(main())


def test_continuous_usage():
    async def main():
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        events = await http.Api().events(CHAT, {**HELLO, **options})
        assert all(e["usage"]["prompt_tokens"] == 19 for e in events[:-1])
        counts = [e["usage"]["completion_tokens"] for e in events[:-1]]
        assert counts == sorted(counts) and counts[:2] == [0, 1] and counts[-1] == NUM_TOKENS
        events = await http.Api().events(COMPLETIONS, {"prompt": "ab", "echo": True, **options})
        assert [e["usage"]["completion_tokens"] for e in events[:2]] == [0, 1]
        events = await http.Api().events(CHAT, {**HELLO, "stream_options": {"continuous_usage_stats": True}})
        assert not any("usage" in e for e in events[:-1]), "include_usage is what asks for usage"

    asyncio.run(main())
