"""/v1/completions over a fake wire, with a scripted client: prompts in four shapes, n, logprobs, echo."""

import asyncio

import fake_client as http
import pytest
import toy_tokenizers
from fake_client import CHAT, COMPLETIONS, HELLO, NUM_TOKENS

from quire.frontend.http.api.bodies.logprobs import LogprobStyle
from quire.frontend.text.tokenizer import Tokenizer


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

    asyncio.run(main())


def test_an_empty_text_is_a_prompt_where_the_tokenizer_begins_it_with_a_token(monkeypatch):
    async def main():
        api = http.Api()
        monkeypatch.setattr(api.client.tokenizer, "_add_bos", [256])
        for prompt in ("", ["", "a"]):
            status, answer = await api.json("POST", COMPLETIONS, {"prompt": prompt})
            assert status == 200, answer
        assert [s.ids for s in api.client.streams] == [[256], [256], [256, 64]]

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


def test_text_offsets_of_an_echoed_prompt_count_its_characters():
    """Not the tokens' own: a character may be several tokens, and a text may name special ones or lack them."""

    async def main():
        api = http.Api()
        options = {"prompt": "é🎉<s>z", "logprobs": 0, "echo": True}
        _, body = await api.json("POST", COMPLETIONS, options)
        (choice,) = body["choices"]
        # tokens: two of é, four of 🎉, <s>, z, and what is answered
        assert choice["logprobs"]["text_offset"][:9] == [0, 0, 1, 1, 1, 1, 2, 5, 6]
        events = await api.events(COMPLETIONS, options)
        parts = [e["choices"][0]["logprobs"] for e in events[:-1]]
        assert [at for part in parts if part for at in part["text_offset"]] == choice["logprobs"]["text_offset"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # tokens: <s> and a space, which the tokenizer adds, two of é, space, s, <s>, a (with a space that it adds), t
        (toy_tokenizers.llama2_like, [0, 0, 0, 0, 1, 2, 3, 6, 7]),
        (toy_tokenizers.byte_level, [0, 1, 2, 3, 6, 7]),
    ],
)
def test_text_offsets_know_what_tokenizers_add(make, expected):
    tokenizer, text = Tokenizer(make(), {}, {}, None), "é s<s>at"
    offsets = LogprobStyle(tokenizer, 0).offsets(0, text)
    assert [offsets.next(token_id) for token_id in tokenizer.encode(text)] == expected


def test_echo_without_output_scores_a_prompt():
    async def main():
        api = http.Api()
        asked = {"prompt": [1, 2, 3], "max_tokens": 0, "echo": True, "logprobs": 1, "return_token_ids": True}
        _, body = await api.json("POST", COMPLETIONS, asked)
        (choice,) = body["choices"]
        assert choice["prompt_token_ids"] == [1, 2, 3] and choice["token_ids"] == []
        assert choice["text"] == api.client.tokenizer.decode([1, 2, 3]) and choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["tokens"]) == 3 and body["usage"]["completion_tokens"] == 0
        assert api.client.streams[0].params.max_tokens == 1
        for usage in (False, True):
            options = {"include_usage": True, "continuous_usage_stats": usage}
            *events, last, done = await api.events(COMPLETIONS, {**asked, "stream_options": options})
            parts = [event["choices"][0] for event in events]
            assert "".join(p["text"] for p in parts) == choice["text"] and parts[-1]["finish_reason"] == "length"
            for name, values in choice["logprobs"].items():
                assert [v for p in parts if p["logprobs"] for v in p["logprobs"][name]] == values
            assert not any(p.get("token_ids") for p in parts)
            assert last["usage"]["completion_tokens"] == 0 and done == "[DONE]"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("count", "body", "status"),
    [
        (200, {"max_tokens": 0, "echo": True, "logprobs": 1}, 200),
        (200, {"max_tokens": 0, "echo": True, "stream": True}, 200),
        (201, {"max_tokens": 0, "echo": True}, 400),
        (200, {"max_tokens": 1, "echo": True}, 400),
        (200, {"max_tokens": 1}, 400),
    ],
)
def test_echo_without_output_takes_a_prompt_as_long_as_the_context(count, body, status):
    async def main():
        api = http.Api()
        assert (await api.ask("POST", COMPLETIONS, {"prompt": [1] * count, **body})).status == status

    asyncio.run(main())


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

    asyncio.run(main())
