"""The routes, over a fake wire, with a scripted client: shapes, parameters, streams, and every refusal by name."""

import asyncio
import json
import logging
import re

import fake_http as http
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.client import EngineDown, EngineError, InvalidRequest, Overloaded, TooLong
from quire.frontend.http.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from quire.frontend.outputs import Delta

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
NUM_TOKENS = 21  # of FakeClient.OUTPUT


def run(coroutine):
    return asyncio.run(coroutine)


# ---------------------------------------------------------------------------------------------------------------- chat
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

    run(main())


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

    run(main())


def test_a_stream_writes_once_per_turn_and_its_head_with_the_first_text():
    async def main():
        api = http.Api()
        api.client.speak = None
        wire = api.wire()
        await wire.talk(api.encode("POST", CHAT, {**HELLO, "stream": True, "n": 2}))
        (stream,) = api.client.streams
        assert wire.transport.num_writes == 0
        stream.push(Delta(0, "a", [1], num_tokens=1), Delta(1, "b", [2], num_tokens=1))
        await http.settle()
        assert wire.transport.num_writes == 1
        stream.push(Delta(0, "c", [1], num_tokens=2), Delta(1, "", [2], num_tokens=2))
        await http.settle()
        assert wire.transport.num_writes == 2
        stream.push(Delta(0, "", [1], num_tokens=3))  # held back: nothing to say
        await http.settle()
        assert wire.transport.num_writes == 2
        stream.push(Delta(0, "d", [1], None, "length", None, 4), Delta(1, "", [], None, "stop", "X", 2))
        stream.end()
        await http.settle()
        choices = [e["choices"][0] for e in http.parse_events(wire.answers()[0].body)[:-1]]
        texts = ["".join(c["delta"].get("content", "") for c in choices if c["index"] == i) for i in (0, 1)]
        ends = {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]}
        assert texts == ["acd", "b"] and ends == {0: ("length", None), 1: ("stop", "X")}

    run(main())


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

    run(main())


def test_a_server_may_allow_fewer_logprobs():
    async def main():
        api = http.Api()
        welcome = api.client.welcome
        api.client.welcome = msgspec.structs.replace(welcome, limits=msgspec.structs.replace(welcome.limits, max_logprobs=3))
        status, answer = await api.json("POST", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 4})
        assert status == 400 and answer["error"]["param"] == "top_logprobs" and "at most 3" in answer["error"]["message"]

    run(main())


def test_impossible_tokens_are_sent_as_a_number():
    async def main():
        _, whole = await http.Api().json("POST", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 5})
        assert whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"][-1]["logprob"] == -9999.0

    run(main())


def test_chat_extras_reach_the_template():
    async def main():
        api = http.Api()
        decode = api.client.tokenizer.decode
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        cases = [
            ({"tools": [tool, tool], "tool_choice": "auto"}, "<user>hi[2 tools]<assistant>"),
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

    run(main())


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
        assert [i for e in events[:-1] for i in e["choices"][0].get("token_ids", [])] == ids

    run(main())


def test_continuous_usage():
    async def main():
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        events = await http.Api().events(CHAT, {**HELLO, **options})
        assert all(e["usage"]["prompt_tokens"] == 19 for e in events[:-1])
        counts = [e["usage"]["completion_tokens"] for e in events[:-1]]
        assert counts == sorted(counts) and counts[:2] == [0, 1] and counts[-1] == NUM_TOKENS
        events = await http.Api().events(COMPLETIONS, {"prompt": "ab", "echo": True, **options})
        assert [e["usage"]["completion_tokens"] for e in events[:2]] == [0, 1]

    run(main())


# --------------------------------------------------------------------------------------------------------- completions
def test_completions_take_prompts_in_four_shapes():
    async def main():
        api = http.Api()
        text = api.client.tokenizer.encode("ab")
        for prompt, expected in [
            ("ab", [text]),
            (["ab", "ab"], [text, text]),
            ([1, 2, 3], [[1, 2, 3]]),
            ([[1, 2], [3]], [[1, 2], [3]]),
        ]:
            api.client.streams.clear()
            status, body = await api.json("POST", COMPLETIONS, {"model": "tiny", "prompt": prompt})
            assert status == 200 and [s.ids for s in api.client.streams] == expected
            assert [c["index"] for c in body["choices"]] == list(range(len(expected)))
            assert all(c["text"] == api.client.OUTPUT for c in body["choices"])
            assert body["usage"]["completion_tokens"] == NUM_TOKENS * len(expected)
            assert api.client.streams[0].params.max_tokens == 16

    run(main())


def test_an_empty_text_is_a_prompt_where_the_tokenizer_begins_it_with_a_token(monkeypatch):
    async def main():
        api = http.Api()
        monkeypatch.setattr(api.client.tokenizer, "_add_bos", [256])
        for prompt in ("", ["", "a"]):
            status, answer = await api.json("POST", COMPLETIONS, {"prompt": prompt})
            assert status == 200, answer
        assert [s.ids for s in api.client.streams] == [[256], [256], [256, 64]]

    run(main())


def test_choices_of_many_prompts_and_n_are_numbered():
    async def main():
        api = http.Api()
        body = {"prompt": ["a", "b"], "n": 3}
        _, whole = await api.json("POST", COMPLETIONS, body)
        assert [c["index"] for c in whole["choices"]] == list(range(6))
        events = await api.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        assert events.pop() == "[DONE]"
        assert events.pop()["usage"] == whole["usage"]
        texts, ends = [""] * 6, []
        for event in events:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
            ends += [choice["index"]] if choice["finish_reason"] else []
        assert texts == [api.client.OUTPUT] * 6 and sorted(ends) == list(range(6))

    run(main())


def test_completion_logprobs_and_echo_stream_and_whole_are_equal():
    async def main():
        api = http.Api()
        body = {"prompt": "ab", "logprobs": 2, "echo": True}
        _, whole = await api.json("POST", COMPLETIONS, body)
        (choice,) = whole["choices"]
        assert choice["text"] == "ab" + api.client.OUTPUT
        logprobs = choice["logprobs"]
        assert logprobs["tokens"][:4] == ["a", "b", "G", "r"] and logprobs["text_offset"][:4] == [0, 1, 2, 3]
        assert logprobs["token_logprobs"][:3] == [None, -3.0, -3.0] and logprobs["top_logprobs"][0] is None
        token = api.client.tokenizer.token_str
        assert logprobs["top_logprobs"][2] == {token(10): -1.0, token(11): -2.0, "G": -3.0}
        assert api.client.streams[0].params.prompt_logprobs == 2 and choice["prompt_logprobs"] is None
        events = await api.events(COMPLETIONS, body)
        parts = [e["choices"][0] for e in events[:-1]]
        assert "".join(p["text"] for p in parts) == choice["text"]
        for name, values in logprobs.items():
            assert [v for p in parts if p["logprobs"] for v in p["logprobs"][name]] == values

    run(main())


def test_text_offsets_are_positions_in_the_text():
    async def main():
        api = http.Api()
        special = api.client.tokenizer.bos_token_id
        ids = [special, *api.client.tokenizer.encode("ab")]
        for skip, offsets in [(True, [0, 0, 1, 2]), (False, [0, 3, 4, 5])]:
            options = {"prompt": ids, "logprobs": 0, "echo": True, "skip_special_tokens": skip}
            _, body = await api.json("POST", COMPLETIONS, {**options, "return_tokens_as_token_ids": True})
            logprobs = body["choices"][0]["logprobs"]
            assert logprobs["text_offset"][:4] == offsets and logprobs["tokens"][0] == f"token_id:{special}"

    run(main())


def test_echo_without_output_scores_a_prompt():
    async def main():
        api = http.Api()
        _, body = await api.json("POST", COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 0, "echo": True, "logprobs": 1})
        (choice,) = body["choices"]
        assert choice["text"] == api.client.tokenizer.decode([1, 2, 3]) and choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["tokens"]) == 3 and body["usage"]["completion_tokens"] == 0
        assert api.client.streams[0].params.max_tokens == 1

    run(main())


def test_prompt_logprobs_in_vllm_shape():
    async def main():
        for path, body, pick in [
            (CHAT, HELLO, lambda r: r["prompt_logprobs"]),
            (COMPLETIONS, {"prompt": "ab"}, lambda r: r["choices"][0]["prompt_logprobs"]),
        ]:
            api = http.Api()
            _, answer = await api.json("POST", path, {**body, "prompt_logprobs": 1})
            first, second, *_ = pick(answer)
            own = str(api.client.streams[0].ids[1])
            assert first is None and second[own]["logprob"] == -3.0 and second[own]["rank"] == 3
            assert second["10"]["decoded_token"] == api.client.tokenizer.token_str(10)

    run(main())


# ---------------------------------------------------------------------------------------------------------- parameters
SAMPLING = {
    "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    "repetition_penalty": 1.1, "seed": 42, "stop": ["x", "y"], "stop_token_ids": [3], "include_stop_str_in_output": True,
    "ignore_eos": True, "max_tokens": 9, "min_tokens": 2, "allowed_token_ids": [1, 2], "bad_words": ["zz"],
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "prompt_logprobs": 1,
}  # fmt: skip


@pytest.mark.parametrize(("path", "base"), [(CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})])
def test_every_sampling_parameter_arrives(path, base):
    async def main():
        api = http.Api()
        extra = {"logit_bias": {"5": -1.5}, "priority": -3, "cache_salt": "s"}
        status, answer = await api.json("POST", path, {**base, **SAMPLING, **extra})
        assert status == 200, answer
        (stream,) = api.client.streams
        for name, value in SAMPLING.items():
            assert getattr(stream.params, name) == value, name
        assert stream.params.logit_bias == {5: -1.5}
        assert stream.options["priority"] == -3 and stream.options["cache_salt"] == "s"
        nulls = dict.fromkeys([*SAMPLING, *extra, "stream", "stream_options", "user", "model", "logprobs", "tools"])
        status, answer = await api.json("POST", path, {**nulls, **base})
        assert status == 200, answer  # null is as good as absent

    run(main())


def test_defaults_come_from_the_generation_config():
    async def main():
        config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 50, "repetition_penalty": 1.05}
        api = http.Api(http.FakeClient(config))
        for path, base in [(CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})]:
            await api.json("POST", path, base)
            params = api.client.streams[-1].params
            assert (params.temperature, params.top_k, params.max_tokens, params.repetition_penalty) == (0.6, 20, 50, 1.05)
            await api.json("POST", path, {**base, "temperature": 0, "max_tokens": 3})
            params = api.client.streams[-1].params
            assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 20, 3)
        await api.json("POST", CHAT, {**HELLO, "max_completion_tokens": 5, "max_tokens": 7})
        assert api.client.streams[-1].params.max_tokens == 5
        await api.json("POST", COMPLETIONS, {"prompt": [1] * 190})
        assert api.client.streams[-1].params.max_tokens == 10  # a default never asks for more than there is room for

    run(main())


def test_harmless_fields_are_accepted():
    async def main():
        harmless = {
            "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True,
            "response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"], "best_of": 1,
            "reasoning_effort": "low", "guided_json": None, "audio": None, "use_beam_search": False, "unheard_of": [1],
            "prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low",
        }  # fmt: skip
        api = http.Api()
        for path, base in [(CHAT, HELLO), (COMPLETIONS, {"prompt": "a", "suffix": ""})]:
            status, answer = await api.json("POST", path, {**base, **harmless})
            assert status == 200, answer

    run(main())


def test_an_unknown_field_is_said_once_and_answered(caplog, monkeypatch):
    async def main():
        api = http.Api()
        for path, base in [(CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})]:
            for _ in range(2):
                status, _ = await api.json("POST", path, {**base, "temprature": 0.1, "user": "u", "x" * 100_000: 1})
                assert status == 200
        said = sorted(record.getMessage() for record in caplog.records)
        assert len(said) == 2 and "'temprature'" in said[0] and "xxx" in said[1] and len(said[1]) < 200
        for i in range(200):
            await api.json("POST", COMPLETIONS, {"prompt": "a", f"field-{i}": 1})
        assert len(caplog.records) == 100
        status, _ = await api.json("POST", COMPLETIONS, b'{"prompt": "a", "\xff": 1}')
        assert status == 400

    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    run(main())


REFUSED = [
    ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}] * 20_000}, "messages"),
    ({"messages": [{"role": "user", "content": ["a"] * 20_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}] * 20_000}]}, "messages"),
    ({"tools": [{}] * 2000}, "tools"), ({"documents": [{}] * 2000}, "documents"),
    ({"chat_template_kwargs": {f"a{i}": i for i in range(100)}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user"}]}, "messages"), ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"), ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"max_tokens": "9"}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 10**12}, "n"), ({"seed": 2**70}, "seed"), ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 10**9}, "min_tokens"), ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": 5}, "stop"), ({"stop": [5]}, "stop[0]"), ({"stop": [""]}, "stop"), ({"stop": ["x"] * 100}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"), ({"stop_token_ids": list(range(300))}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"5": 101}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"), ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stream": 1}, "stream"),
    ({"priority": 2**40}, "priority"), ({"cache_salt": "x" * 300}, "cache_salt"), ({"model": 3}, "model"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"echo": True}, "echo"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"tools": {}}, "tools"), ({"tools": [1]}, "tools[0]"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"response_format": "text"}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"modalities": ["text", "audio"]}, "modalities"), ({"audio": {"voice": "x"}}, "audio"), ({"best_of": 3}, "best_of"),
    ({"functions": [{}]}, "functions"), ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs"), ({"use_beam_search": True}, "use_beam_search"),
    ({"chat_template": "{{ x }}"}, "chat_template"), ({"prediction": {"type": "content"}}, "prediction"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "param"), REFUSED, ids=[json.dumps(e)[:40] for e, _ in REFUSED])
def test_wrong_values_get_400_and_the_field_is_named(extra, param):
    async def main():
        api = http.Api()
        for stream in (False, True):
            if stream and "stream_options" in extra:
                continue
            status, answer = await api.json("POST", CHAT, {**HELLO, "stream": stream, **extra})
            error = answer.get("error")
            assert status == 400 and error, answer
            assert error["param"] == param and error["type"] == "invalid_request_error" and error["code"]
            assert param.partition("[")[0] in error["message"]
        assert not api.client.streams

    run(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [-1]}, "prompt[0]"), ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [2**40]}, "prompt[0]"), ({"prompt": ["a"] * 1025}, "prompt"), ({"prompt": ["a"] * 20, "n": 128}, "n"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"), ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"), ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)  # fmt: skip
def test_completions_refuse_by_name(body, param):
    async def main():
        status, answer = await http.Api().json("POST", COMPLETIONS, body)
        assert status == 400 and answer["error"]["param"] == param, answer

    run(main())


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e999}', b"[]", b"null",
     b'{"messages": ' + b"[" * 100_000, b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
     b'{"chat_template_kwargs": ' + b'{"a":' * 50_000, b"\xff\xfe", b'{"model": "\xff"}', b'{"model": "\\ud800"}',
     b'{"messages": [{"role": "user", "content": "hi"}]} x'],
)  # fmt: skip
def test_broken_json_gets_400(body):
    async def main():
        status, answer = await http.Api().json("POST", CHAT, body)
        assert status == 400 and set(answer["error"]) == {"message", "type", "param", "code"}

    run(main())


def test_too_long_names_the_context():
    async def main():
        api = http.Api()
        for path, body, param in [
            (CHAT, {"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
            (CHAT, {"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages"),
            (CHAT, {**HELLO, "max_tokens": 190}, "messages"),
            (COMPLETIONS, {"prompt": [1] * 200}, "prompt"),
            (COMPLETIONS, {"prompt": "x" * 190, "max_tokens": 11}, "prompt"),
        ]:
            status, answer = await api.json("POST", path, body)
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
            assert "200 tokens" in answer["error"]["message"] and answer["error"]["param"] == param
        status, _ = await api.json("POST", COMPLETIONS, {"prompt": "x" * 190, "max_tokens": 10})
        assert status == 200
        status, _ = await api.json("POST", COMPLETIONS, {"prompt": "x" * 500, "truncate_prompt_tokens": 50})
        assert status == 200 and len(api.client.streams[-1].ids) == 50
        for keep in (50, 190):  # more text than is ever tokenized
            long = "y" * 300_000 + "x" * 500
            body = {"messages": [{"role": "user", "content": long}], "add_generation_prompt": False}
            for path, fields in [(COMPLETIONS, {"prompt": long}), (CHAT, body)]:
                status, answer = await api.json("POST", path, {**fields, "truncate_prompt_tokens": keep, "max_tokens": 5})
                assert status == 200, answer
                assert api.client.streams[-1].ids == api.client.tokenizer.encode("x" * keep)

    run(main())


def test_a_long_prompt_is_encoded_in_a_thread():
    async def main():
        api = http.Api()
        status, answer = await api.json("POST", "/tokenize", {"prompt": "x" * 100_000})
        assert status == 200 and answer["count"] == 100_000

    run(main())


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (InvalidRequest("the prompt holds a token id outside the vocabulary of 300"), 400, "invalid_value", None),
        (TooLong("too long"), 400, "context_length_exceeded", None),
        (Overloaded("full"), 503, "overloaded", "1"),
        (EngineDown("gone"), 503, "engine_down", "2"),
        (EngineError("broken"), 500, "engine_error", None),
        (RuntimeError("secret detail"), 500, "internal_error", None),
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

    logging.getLogger("quire.http").disabled = True
    run(main())
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

    run(main())


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

    run(main())


def test_one_failed_prompt_stops_the_others():
    async def main():
        api = http.Api()
        api.client.speak = lambda s: s.end(EngineDown("gone")) if s.id == 1 else None
        for stream in (False, True):
            api.client.streams.clear()
            answer = await api.ask("POST", COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": stream})
            assert answer.status == 503
            assert [s.cancelled for s in api.client.streams] == [True, False, True]

    run(main())


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
        aborted = f'quire:request_success_total{{finished_reason="abort",model_name="tiny"}} {len(api.client.streams)}.0'
        assert aborted in (await api.ask("GET", "/metrics")).body.decode()

    run(main())


def test_a_slow_client_stops_the_pump_and_gets_everything_later():
    async def main():
        api = http.Api()
        api.client.speak = None
        wire = api.wire()
        await wire.talk(api.encode("POST", CHAT, {**HELLO, "stream": True}))
        (stream,) = api.client.streams
        stream.push(Delta(0, "0 ", [1], num_tokens=1))
        await http.settle()
        wire.connection.pause_writing()
        written = len(wire.transport.sent)
        for i in range(1, 50):
            stream.push(Delta(0, f"{i} ", [1], num_tokens=i + 1))
            await http.settle(2)
        assert len(wire.transport.sent) < written + 300  # at most the chunk that was under way
        assert len(stream.turns) == 48
        wire.connection.resume_writing()
        stream.push(Delta(0, "", [], None, "stop", None, 50))
        stream.end()
        await http.settle(300)
        events = http.parse_events(wire.answers()[0].body)
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
        assert text == "".join(f"{i} " for i in range(50))

    run(main())


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

    run(main())


# --------------------------------------------------------------------------------------------------------- other routes
def test_models():
    async def main():
        api = http.Api()
        _, answer = await api.json("GET", "/v1/models")
        assert answer["object"] == "list" and [m["id"] for m in answer["data"]] == ["tiny", "org/tiny"]
        assert answer["data"][0]["max_model_len"] == 200 and answer["data"][1]["root"] == "tiny"
        for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
            status, card = await api.json("GET", path)
            assert status == 200 and card["id"] == "org/tiny" and card["object"] == "model"
        for method, path, body in [
            ("GET", "/v1/models/huge", None),
            ("POST", CHAT, {**HELLO, "model": "huge"}),
            ("POST", COMPLETIONS, {"prompt": "a", "model": "huge"}),
            ("POST", "/tokenize", {"prompt": "a", "model": "huge"}),
        ]:
            status, answer = await api.json(method, path, body)
            assert status == 404 and answer["error"]["code"] == "model_not_found" and answer["error"]["param"] == "model"

    run(main())


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health(path):
    async def main():
        api = http.Api()
        answer = await api.ask("GET", path)
        assert answer.status == 200 and answer.body == b""
        assert (await api.ask("HEAD", path)).status == 200
        api.client.problem = "the engine's loop has not been heard for 2 s"
        answer = await api.ask("GET", path)
        assert answer.status == 503 and b"not been heard" in answer.body and answer.headers["retry-after"] == "2"

    run(main())


def test_version():
    assert run(http.Api().json("GET", "/version")) == (200, {"version": "0.1.0"})


def test_tokenize_and_detokenize():
    async def main():
        api = http.Api()
        _, answer = await api.json("POST", "/tokenize", {"model": "tiny", "prompt": "hé", "return_token_strs": True})
        assert answer["count"] == 3 and answer["max_model_len"] == 200 and answer["token_strs"][0] == "h"
        _, text = await api.json("POST", "/detokenize", {"tokens": answer["tokens"]})
        assert text == {"prompt": "hé"}
        _, answer = await api.json("POST", "/tokenize", HELLO)
        assert api.client.tokenizer.decode(answer["tokens"]) == "<user>hi<assistant>" and answer["token_strs"] is None
        for path, body in [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", **HELLO}),
            ("/tokenize", {"prompt": 3}),
            ("/tokenize", {**HELLO, "chat_template": "x"}),
            ("/detokenize", {"tokens": [300]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": "x"}),
            ("/detokenize", {"tokens": [1] * ((1 << 20) + 1)}),
        ]:
            assert (await api.json("POST", path, body))[0] == 400, body

    run(main())


def test_unknown_paths_methods_and_types():
    async def main():
        api = http.Api()
        for path in ("/", "/nope", "/v1", "/v1/chat/completions/", "//health", "/health/", "/%68ealth", "http://x/health"):
            assert (await api.ask("GET", path)).status == 404, path
        answer = await api.ask("GET", CHAT)
        assert answer.status == 405 and answer.headers["allow"] == "POST"
        answer = await api.ask("DELETE", "/v1/models")
        assert answer.status == 405 and answer.headers["allow"] == "GET, HEAD"
        assert (await api.ask("POST", CHAT, HELLO, {"Content-Type": "text/plain"})).status == 415
        assert (await api.ask("POST", CHAT, HELLO, {"Content-Encoding": "gzip"})).status == 415
        assert (await api.ask("POST", CHAT, HELLO, {"Content-Type": "application/json; charset=utf-8"})).status == 200
        assert (await api.ask("GET", "/health?x=/v1/models")).status == 200

    run(main())


def test_metrics():
    async def main():
        api = http.Api()
        await api.json("POST", CHAT, HELLO)
        await api.events(CHAT, {**HELLO, "n": 2, "max_tokens": 30})
        await api.json("POST", CHAT, {**HELLO, "n": 0})
        await api.ask("GET", "/secret-path")
        text = (await api.ask("GET", "/metrics")).body.decode()
        for line in [
            'quire:num_requests_running{model_name="tiny"} 3.0',
            'quire:num_requests_waiting{model_name="tiny"} 4.0',
            'quire:kv_cache_usage_perc{model_name="tiny"} 0.25',
            'quire:prompt_tokens_total{model_name="tiny"} 100.0',
            'quire:generation_tokens_total{model_name="tiny"} 50.0',
            'quire:prefix_cache_hits_total{model_name="tiny"} 40.0',
            'quire:num_preemptions_total{model_name="tiny"} 2.0',
            'quire:request_success_total{finished_reason="stop",model_name="tiny"} 3.0',
            'quire:http_requests_total{handler="/v1/chat/completions",status="2xx"} 2.0',
            'quire:http_requests_total{handler="/v1/chat/completions",status="4xx"} 1.0',
            'quire:http_requests_total{handler="other",status="4xx"} 1.0',
            'quire:time_to_first_token_seconds_count{model_name="tiny"} 2.0',
            'quire:e2e_request_latency_seconds_count{model_name="tiny"} 2.0',
            'quire:request_queue_time_seconds_count{model_name="tiny"} 2.0',
            'quire:request_prompt_tokens_sum{model_name="tiny"} 38.0',
            f'quire:request_generation_tokens_sum{{model_name="tiny"}} {3.0 * NUM_TOKENS}',
            'quire:request_params_max_tokens_count{model_name="tiny"} 1.0',
        ]:
            assert line in text, line
        assert "secret" not in text
        api.client.speak = lambda stream: stream.end(EngineError("broken"))
        await api.json("POST", CHAT, HELLO)
        assert 'finished_reason="error",model_name="tiny"} 1.0' in (await api.ask("GET", "/metrics")).body.decode()
        gaps = len(api.client.OUTPUT)  # turns of the one stream, less one
        assert f'quire:inter_token_latency_seconds_count{{model_name="tiny"}} {gaps}.0' in text

    run(main())


# ---------------------------------------------------------------------------------------------------------------- keys
EVERY_ROUTE = [
    ("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("GET", "/version"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/metrics"), ("GET", "/nope"), ("GET", "/"), ("OPTIONS", CHAT),
    ("GET", "//health"), ("GET", "/health/"), ("GET", "/%68ealth"), ("GET", "http://x/health"), ("GET", "/Health"),
    ("GET", "/health/../v1/models"), ("GET", "/v1/models?/health"), ("GET", "/health;x"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
def test_every_path_but_health_needs_a_key(method, path):
    async def main():
        api = http.Api(api_keys=["first-key", "second-key"])
        body = HELLO if method == "POST" else None
        for headers in (
            {}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer first-ke"}, {"Authorization": "first-key"},
            {"Authorization": "Basic first-key"}, {"Authorization": "Bearer "},
            {"Authorization": "Bearer first-key,second-key"},
            {"X-Api-Key": "first-key"}, {"Host": "/health"},
        ):  # fmt: skip
            answer = await api.ask(method, path, body, headers)
            assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer", headers
            assert b"first" not in answer.body
        for key in ("first-key", "second-key"):
            assert (await api.ask(method, path, body, {"Authorization": f"Bearer {key}"})).status != 401
        assert (await api.ask(method, path, body, {"authorization": "bearer first-key"})).status != 401

    run(main())


def test_health_and_optionally_metrics_are_open():
    async def main():
        closed, opened = http.Api(api_keys=["k"]), http.Api(api_keys=["k"], metrics_open=True)
        assert (await closed.ask("GET", "/health")).status == (await closed.ask("GET", "/ping")).status == 200
        assert (await opened.ask("GET", "/health?x=1")).status == 200
        assert (await closed.ask("GET", "/metrics")).status == 401
        assert (await opened.ask("GET", "/metrics")).status == 200

    run(main())


def test_without_a_key_no_body_is_read():
    async def main():
        api = http.Api(api_keys=["k"])
        wire = api.wire()
        head = api.encode("POST", CHAT, HELLO).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n").partition(b"{")[0]
        (answer,) = await wire.talk(head)
        assert answer.status == 401 and wire.server.held_bytes == 0

    run(main())


# -------------------------------------------------------------------------------------------------------------- origins
PAGE = {"Origin": "https://page.example"}
PREFLIGHT = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_a_page_may_ask_before_it_sends_without_a_key():
    async def main():
        api = http.Api(api_keys=["k"])
        for path in (CHAT, "/v1/models", "/nope"):
            answer = await api.ask("OPTIONS", path, headers=PREFLIGHT)
            assert answer.status == 200 and answer.body == b""
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        strange = {**PREFLIGHT, "Access-Control-Request-Headers": "a;b"}
        assert "access-control-allow-headers" not in (await api.ask("OPTIONS", CHAT, headers=strange)).headers
        assert (await api.ask("OPTIONS", CHAT, headers=PAGE)).status == 401  # no question of a browser's

    run(main())


def test_every_answer_says_which_pages_may_read_it():
    async def main():
        one_page, nobody = http.Api(allowed_origins=[PAGE["Origin"], "http://other"]), http.Api(allowed_origins=[])
        for method, path, body, status in [
            ("POST", CHAT, HELLO, 200), ("POST", CHAT, {**HELLO, "stream": True}, 200), ("POST", CHAT, {**HELLO, "n": 0}, 400),
            ("GET", "/v1/models", None, 200), ("GET", "/nope", None, 404), ("GET", CHAT, None, 405), ("POST", CHAT, b"{", 400),
            ("OPTIONS", CHAT, None, 200),
        ]:  # fmt: skip
            asked = PREFLIGHT if method == "OPTIONS" else PAGE
            for api, allowed, vary in ((http.Api(), "*", None), (one_page, PAGE["Origin"], "origin"), (nobody, None, "origin")):
                answer = await api.ask(method, path, body, asked)
                assert answer.status == status
                assert answer.headers.get("access-control-allow-origin") == allowed and answer.headers.get("vary") == vary
            answer = await one_page.ask(method, path, body, {**asked, "Origin": "https://page.example.evil"})
            assert "access-control-allow-origin" not in answer.headers
        assert "access-control-allow-origin" not in (await http.Api().ask("GET", "/health")).headers

    run(main())


# --------------------------------------------------------------------------------------------------- names and their log
def test_a_request_may_bring_its_name():
    async def main():
        api = http.Api()
        for path, body, prefix in [(CHAT, HELLO, "chatcmpl-"), (COMPLETIONS, {"prompt": "a"}, "cmpl-")]:
            answer = await api.ask("POST", path, body, {"X-Request-Id": "job:7_a.b-c"})
            assert answer.headers["x-request-id"] == "job:7_a.b-c"
            assert json.loads(answer.body)["id"] == api.client.streams[-1].request_name == f"{prefix}job:7_a.b-c"
            answer = await api.ask("POST", path, {**body, "stream": True}, {"X-Request-Id": "s"})
            assert answer.headers["x-request-id"] == "s"
            assert http.parse_events(answer.body)[0]["id"] == f"{prefix}s"
            for bad in ("", "x" * 129, "a b", 'a"b', "ä"):
                answer = await api.ask("POST", path, body, {"X-Request-Id": bad})
                assert answer.status == 200 and "x-request-id" not in answer.headers
                assert len(json.loads(answer.body)["id"]) == len(prefix) + 32
        answer = await api.ask("POST", CHAT, {**HELLO, "n": 0}, {"X-Request-Id": "wrong"})
        assert answer.status == 400 and answer.headers["x-request-id"] == "wrong"

    run(main())


def test_requests_are_logged_by_the_names_that_clients_see(caplog, monkeypatch):
    def said() -> list[str]:
        lines = [re.sub(r"\d+\.\d+ s$", "T", record.getMessage()) for record in caplog.records]
        caplog.clear()
        return lines

    async def main():
        silent, api = http.Api(), http.Api(log_requests=True)
        await silent.json("POST", CHAT, HELLO)
        assert said() == []
        _, answer = await api.json("POST", CHAT, {**HELLO, "temperature": 0.5, "stop": ["secret"]})
        name = answer["id"]
        assert said() == [
            f"request {name}: 19 prompt tokens, max_tokens=181, temperature=0.5",
            f"request {name}: stop, 19 prompt tokens, {NUM_TOKENS} output tokens, T",
        ]
        await api.ask("POST", COMPLETIONS, {"prompt": ["a", "bc"], "stream": True}, {"X-Request-Id": "x"})
        assert said() == [
            "request cmpl-x: 3 tokens in 2 prompts, max_tokens=16, streamed",
            f"request cmpl-x: stop, 3 tokens in 2 prompts, {2 * NUM_TOKENS} output tokens, T",
        ]
        api.client.speak = lambda stream: stream.end(EngineError("broken"))
        await api.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 5}, {"X-Request-Id": "x"})
        assert said()[1] == "request cmpl-x: error, 1 prompt tokens, 0 output tokens, T"
        api.client.speak = lambda stream: stream.push(Delta(0, "a", [1], num_tokens=1))
        wire = api.wire()
        await wire.talk(api.encode("POST", CHAT, {**HELLO, "stream": True}, {"X-Request-Id": "gone"}))
        wire.connection.connection_lost(None)
        await http.settle()
        assert said()[1] == "request chatcmpl-gone: abort, 19 prompt tokens, 1 output tokens, T"

    caplog.set_level(logging.INFO, logger="quire.http")
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    run(main())


# ---------------------------------------------------------------------------------------------------------- properties
@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=6), max_size=12), st.booleans(), st.booleans())
def test_a_stream_says_what_the_whole_answer_says(pieces, chat, usage):
    async def main():
        api = http.Api()

        def speak(stream):
            for i, piece in enumerate(pieces):
                stream.push(Delta(0, piece, [i], num_tokens=i + 1))
            stream.push(Delta(0, "", [], None, "stop", None, len(pieces)))
            stream.end()

        api.client.speak = speak
        path, body = (CHAT, HELLO) if chat else (COMPLETIONS, {"prompt": "a"})
        _, whole = await api.json("POST", path, body)
        events = await api.events(path, {**body, **({"stream_options": {"include_usage": True}} if usage else {})})
        choices = [c for e in events[:-1] for c in e["choices"]]
        text = "".join(c["delta"].get("content", "") if chat else c["text"] for c in choices)
        whole_choice = whole["choices"][0]
        assert text == (whole_choice["message"]["content"] if chat else whole_choice["text"]) == "".join(pieces)
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
        assert not usage or events[-2]["usage"] == whole["usage"]

    run(main())


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
_FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *TokenizeRequest.__struct_fields__})


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]),
    st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4),
)
def test_no_body_is_a_bug_of_ours(path, fields):
    async def main():
        body = {**({"prompt": "a", "tokens": [1]} if path != CHAT else HELLO), **fields}
        answer = await http.Api().ask("POST", path, body)
        assert answer.status in (200, 400, 404), (body, answer.body)
        if answer.status != 200:
            assert json.loads(answer.body)["error"]["message"]

    run(main())
