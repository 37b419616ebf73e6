"""Requests that are large, or cost much: refused in time or worked on beside the loop, which goes on for others."""

import asyncio
import json
import threading

import fake_client as http
import pytest
from fake_client import CHAT, COMPLETIONS
from hypothesis import given
from hypothesis import strategies as st
from loop_gap import MOST_S, LoopGap

from quire.frontend.client.turns import Slice, in_thread, turn
from quire.frontend.http.api.bodies.body_shape import MAX_WEIGHT, WEIGHED_BYTES, check_shape, weight_of
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.chat_template import MAX_ARGUMENT_MARKS, ChatTemplate, ChatTemplateError, _tojson

values = st.recursive(
    st.none() | st.integers(0, 99) | st.text('a"\\[]{},: \n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('k"\\,[', max_size=4), inner, max_size=4),
)


def weight_by_hand(value) -> int:
    """Commas, colons and opening brackets outside of strings."""
    if isinstance(value, list):
        return 5 + max(0, len(value) - 1) + sum(map(weight_by_hand, value))
    if isinstance(value, dict):
        return 5 + max(0, len(value) - 1) + 4 * len(value) + sum(map(weight_by_hand, value.values()))
    return 0


@given(values)
def test_a_body_is_weighed_by_what_stands_outside_of_strings(value):
    assert weight_of(json.dumps(value).encode()) == 1 + weight_by_hand(value)
    assert weight_of(json.dumps(value, ensure_ascii=False, indent=1).encode()) == 1 + weight_by_hand(value)


@given(st.binary(max_size=64))
def test_what_is_no_json_has_some_weight(data):
    assert weight_of(data) >= 1


def test_text_weighs_nothing_and_lists_do():
    check_shape(json.dumps({"prompt": 'a, [b] "c" \\ {d: e}' * 200_000}).encode())
    check_shape(json.dumps({"tokens": [1] * (1 << 20)}).encode())
    with pytest.raises(ApiError, match=str(MAX_WEIGHT)):
        check_shape(b"[" + b"[]," * 250_000 + b"[]]")


def test_a_body_that_would_hold_the_loop_is_refused_beside_it():
    async def main():
        api = http.Api()
        bodies = (
            b'{"prompt":[' + b"[]," * 1_000_000 + b"[]]}",
            b'{"messages":[{"role":"user","content":[' + b'{"a":1},' * 500_000 + b"{}]}]}",
            b'{"prompt":"a",' + b",".join(b'"f%d":1' % i for i in range(300_000)) + b"}",
        )
        async with LoopGap() as gap:
            for body in bodies:
                answer = await api.ask("POST", CHAT, body)
                assert answer.status == 400 and json.loads(answer.body)["error"]["code"] == "body_too_complex"
        assert gap.worst_s < MOST_S

    asyncio.run(main())


def test_large_json_in_a_template_is_the_same_json():
    value = {"a": [{"b": i, "c": "ü<"} for i in range(20_000)], "d": None}
    for options in ({}, {"indent": 2}, {"ensure_ascii": True}, {"separators": (",", ":")}, {"sort_keys": True}):
        assert _tojson(value, **options) == json.dumps(value, **{"ensure_ascii": False, **options})


def test_arguments_of_a_tool_call_are_bounded_by_what_they_hold():
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | length }}", {})

    def render(arguments: str) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return template.render([{"role": "assistant", "tool_calls": [call]}])

    assert render(json.dumps({"text": "x" * 3_000_000, "more": 1})) == "2"
    with pytest.raises(ChatTemplateError, match=str(MAX_ARGUMENT_MARKS)):
        render(json.dumps({"numbers": [1] * (MAX_ARGUMENT_MARKS + 1)}))


def test_bad_words_are_tokenized_once_for_all_prompts(monkeypatch):
    async def main():
        client = http.FakeClient()
        calls = []
        bad_word_ids = client.tokenizer.bad_word_ids
        monkeypatch.setattr(client.tokenizer, "bad_word_ids", lambda words: (calls.append(1), bad_word_ids(words))[1])
        api = http.Api(client)
        answer = await api.ask("POST", COMPLETIONS, {"prompt": ["a", "b", "c"], "bad_words": ["no", " never"]})
        assert answer.status == 200 and len(calls) == 1
        assert {len(stream.params.bad_words_token_ids) for stream in client.streams} == {2}
        status, said = await api.json("POST", COMPLETIONS, {"prompt": "a", "bad_words": ["x" * 1000]})
        assert status == 400 and said["error"]["param"] == "bad_words" and "16 tokens" in said["error"]["message"]

    asyncio.run(main())


def test_detokenizing_many_ids_leaves_the_loop_alone():
    async def main():
        api = http.Api()
        body = json.dumps({"tokens": [60 + i % 30 for i in range(200_000)]}).encode()  # takes the client as long as the server
        async with LoopGap() as gap:
            answer = await api.ask("POST", "/detokenize", body)
        assert len(json.loads(answer.body)["prompt"]) == 200_000 and gap.worst_s < MOST_S

    asyncio.run(main())


def test_a_body_below_the_weighed_size_is_not_weighed(monkeypatch):
    async def main():
        body = b'{"prompt":[' + b"[]," * (WEIGHED_BYTES // 4) + b"[]]}"
        assert len(body) < WEIGHED_BYTES
        answer = await http.Api().ask("POST", COMPLETIONS, body)
        assert json.loads(answer.body)["error"]["code"] == "invalid_value"

    asyncio.run(main())


def test_only_one_heavy_piece_runs_in_a_turn_of_the_loop():
    async def main():
        log: list[object] = []

        async def heavy(name: str) -> None:
            for _ in range(3):
                await turn()
                log.append(name)

        async def light() -> None:
            for _ in range(40):
                log.append(None)
                await asyncio.sleep(0)

        await asyncio.gather(heavy("a"), heavy("b"), heavy("c"), light())
        heavy_ones = [each for each in log if each]
        assert sorted(heavy_ones) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3 and heavy_ones[:3] == ["a", "b", "c"]
        assert all(log[i] is None or log[i + 1] is None for i in range(len(log) - 1))
        piece = Slice()
        assert not piece.is_over
        assert await in_thread(threading.current_thread) is not threading.main_thread()

    asyncio.run(main())
