"""What requests may ask for: every parameter arrives, every wrong one is refused by its name; no body is a bug of ours."""

import asyncio
import json
import logging

import fake_client as http
import pytest
from fake_client import CHAT, COMPLETIONS, HELLO
from hypothesis import example, given, settings
from hypothesis import strategies as st
from responses_cases import serving

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import InvalidRequest
from quire.frontend.http.api.bodies.fields import _INSTEAD, NOT_SUPPORTED
from quire.frontend.http.api.bodies.schemas import _HOW, ChatRequest, CompletionRequest, TokenizeRequest, Unsupported
from quire.ipc.sampling import RequestOutputKind

# ------------------------------------------------------------------------------------------------------------ parameters
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

    asyncio.run(main())


ROUTES = [
    (CHAT, HELLO),
    (COMPLETIONS, {"prompt": "a"}),
    ("/v1/messages", {**HELLO, "max_tokens": 9}),
    ("/v1/responses", {"model": "tiny", "input": "hi"}),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"output_kind": 1}}),
]


@pytest.mark.parametrize(("path", "base"), ROUTES, ids=[path for path, _ in ROUTES])
def test_the_engine_knows_whose_tokens_nobody_reads_before_the_end(path, base):
    async def main():
        async with serving() as api:
            for more in ({}, {"stream": False}):
                status, answer = await api.json("POST", path, {**base, **more})
                assert status == 200, answer
                assert api.client.streams[-1].params.output_kind is RequestOutputKind.FINAL_ONLY
            assert (await api.ask("POST", path, {**base, "stream": True})).status == 200
            assert api.client.streams[-1].params.output_kind is not RequestOutputKind.FINAL_ONLY

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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
        assert 50 <= len(caplog.records) <= 53  # as many as are allowed at once
        await api.json("POST", COMPLETIONS, {"prompt": "a", "frequency_penalti": 1})
        assert "did you mean 'frequency_penalty'?" in caplog.messages[-1]  # a likely mistake is said all the same
        status, _ = await api.json("POST", COMPLETIONS, b'{"prompt": "a", "\xff": 1}')
        assert status == 400

    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    asyncio.run(main())


REFUSED = [
    ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}] * 20_000}, "messages"),
    ({"messages": [{"role": "user", "content": ["a"] * 20_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}] * 20_000}]}, "messages"),
    ({"tools": [{}] * 2000}, "tools"), ({"documents": [{}] * 2000}, "documents"),
    ({"chat_template_kwargs": {f"a{i}": i for i in range(100)}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user"}]}, "messages"), ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"), ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"max_tokens": "9x"}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 0, "max_tokens": 7}, "max_completion_tokens"),
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
    ({"logprobs": 3}, "logprobs"), ({"prompt_logprobs": 129}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stream": "perhaps"}, "stream"),
    ({"priority": 2**40}, "priority"), ({"cache_salt": "x" * 1025}, "cache_salt"), ({"model": 3}, "model"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"), ({"request_id": "a b"}, "request_id"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"tools": {}}, "tools"), ({"tools": [1]}, "tools[0]"),
    ({"response_format": {"type": "json_schema"}}, "response_format"), ({"response_format": "text"}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"modalities": ["text", "audio"]}, "modalities"), ({"audio": {"voice": "x"}}, "audio"), ({"best_of": 0}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"), ({"best_of": 129}, "best_of"), ({"length_penalty": 0.5}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"), ({"watermarking": True}, "watermarking"),
    ({"stream_interval": 4}, "stream_interval"), ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"repetition_detection": {"min_count": 2}}, "repetition_detection"),
    ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
    ({"routed_experts_prompt_start": 3}, "routed_experts_prompt_start"),
    ({"functions": [{}]}, "functions"), ({"guided_json": [5]}, "guided_json"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    *(({"use_beam_search": True, **extra}, next(iter(extra))) for extra in (
        {"n": 65}, {"best_of": 65}, {"best_of": 1, "n": 2}, {"stop": ["x"]}, {"presence_penalty": 1}, {"min_tokens": 1},
        {"logit_bias": {"5": 1}}, {"bad_words": ["x"]}, {"prompt_logprobs": 1}, {"length_penalty": 21},
        {"early_stopping": "maybe"}, {"allowed_token_ids": [1]}, {"repetition_penalty": 1.1}, {"frequency_penalty": -1})),
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

    asyncio.run(main())


def test_every_field_that_is_refused_says_why():
    assert Unsupported.__annotations__.keys() == _HOW.keys() and NOT_SUPPORTED.keys() == _INSTEAD.keys()

    async def say(**extra):
        return (await http.Api().json("POST", CHAT, {**HELLO, **extra}))[1]["error"]["message"]

    assert asyncio.run(say(suffix="x")).endswith("fill no gaps; put all of the text into prompt.")
    assert asyncio.run(say(stream_interval=4)).endswith("each token is sent when it is there, as with 1.")
    assert "must be at least 1 and at most 64, got 100" in asyncio.run(say(use_beam_search=True, n=100))
    assert "must be at least 2 and at most 64, got 1" in asyncio.run(say(use_beam_search=True, n=2, best_of=1))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [-1]}, "prompt[0]"), ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [2**40]}, "prompt[0]"), ({"prompt": ["a"] * 1025}, "prompt"), ({"prompt": ["a"] * 20, "n": 128}, "n"),
        ({"prompt": "a", "logprobs": 129}, "logprobs"), ({"prompt": "a", "logprobs": "many"}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"), ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "use_beam_search": True}, "echo"),
    ],
)  # fmt: skip
def test_completions_refuse_by_name(body, param):
    async def main():
        status, answer = await http.Api().json("POST", COMPLETIONS, body)
        assert status == 400 and answer["error"]["param"] == param, answer

    asyncio.run(main())


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

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "said"),
    [(b"", "it ends too early."), (b'{"max_tokens": 3', "it ends too early."),
     (b"{'a': 1}", "object keys must be strings (byte 1)."),
     (b'{"max_tokens": 3,}', "trailing comma in object (byte 17)."), (b'{"model": "\xff"}', "it is not UTF-8."),
     (b'{"model": "\\ud800"}', "is not valid JSON.")],
)  # fmt: skip
def test_broken_json_is_told_where(body, said):
    status, answer = asyncio.run(http.Api().json("POST", CHAT, body))
    assert status == 400 and answer["error"]["message"].endswith(said)


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

    asyncio.run(main())


def test_a_long_prompt_is_encoded_in_a_thread():
    async def main():
        api = http.Api()
        status, answer = await api.json("POST", "/tokenize", {"prompt": "x" * 100_000})
        assert status == 200 and answer["count"] == 100_000

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------------ properties
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

    asyncio.run(main())


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
@example(CHAT, {"use_beam_search": True, "n": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 9})
@example(COMPLETIONS, {"use_beam_search": True, "best_of": 4, "logprobs": 1, "return_token_ids": True})
def test_no_body_is_a_bug_of_ours(path, fields):
    async def main():
        body = {**({"prompt": "a", "tokens": [1]} if path != CHAT else HELLO), **fields}
        answer = await http.Api().ask("POST", path, body)
        assert answer.status in (200, 400, 404), (body, answer.body)
        if answer.status != 200:
            assert json.loads(answer.body)["error"]["message"]

    asyncio.run(main())


def test_arguments_of_logits_processors_are_passed_on_and_classes_are_not():
    async def main():
        api = http.Api()
        for path, body in [(CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})]:
            status, _ = await api.json("POST", path, {**body, "vllm_xargs": {"only": 3, "names": ["a"]}})
            assert status == 200 and api.client.streams[-1].params.extra_args == {"only": 3, "names": ["a"]}
            await api.json("POST", path, {**body, "vllm_xargs": {}})
            assert api.client.streams[-1].params.extra_args is None
            status, answer = await api.json("POST", path, {**body, "logits_processors": ["os:system"]})
            assert status == 400 and "--logits-processors" in answer["error"]["message"]
            assert answer["error"]["param"] == "logits_processors"
            for wrong in ("x", ["x"], {"a": "x" * 20_000}, {str(i): i for i in range(65)}):
                status, answer = await api.json("POST", path, {**body, "vllm_xargs": wrong})
                assert status == 400 and answer["error"]["param"] == "vllm_xargs"
            api.client.submit_error = InvalidRequest("vllm_xargs (extra_args) need an engine that ...")
            status, answer = await api.json("POST", path, {**body, "vllm_xargs": {"only": 3}})
            assert status == 400 and answer["error"]["param"] == "vllm_xargs"
            api.client.submit_error = None

    asyncio.run(main())
