"""Beam search and best_of over the routes, with the real engine and the bundled model behind them."""

import asyncio
from collections.abc import Iterator

import fake_client as http
import pytest
from fake_client import CHAT, COMPLETIONS

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.beam_search import BeamSearchParams
from quire.frontend.client.llm import LLM
from quire.ipc.sampling import SamplingParams

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32", max_model_len=256, max_num_seqs=16, cpu_kv_cache_gib=0.05) as llm:
        yield llm


def ask(llm: LLM, path: str, body: dict) -> tuple[int, dict]:
    async def main():
        async with AsyncClient(llm._own.background._cores[0].address) as client:
            answer = await http.Api(client).json("POST", path, body)  # type: ignore[arg-type]
            assert not client.num_requests
            return answer

    return asyncio.run(main())


def test_beams_are_what_the_python_client_finds(llm):
    body = {"prompt": "The cat", "use_beam_search": True, "n": 3, "max_tokens": 8, "length_penalty": 0.5, "temperature": 0}
    status, answer = ask(llm, COMPLETIONS, {**body, "return_token_ids": True, "logprobs": 2})
    assert status == 200, answer
    (want,) = llm.beam_search("The cat", BeamSearchParams(3, 8, length_penalty=0.5))
    prompt = llm.get_tokenizer().encode("The cat")
    for choice, beam in zip(answer["choices"], want.sequences, strict=True):
        assert choice["token_ids"] == beam.tokens[len(prompt) :]
        assert choice["finish_reason"] == beam.finish_reason and choice["stop_reason"] is None
        assert beam.text == "The cat" + choice["text"]
        logprobs = choice["logprobs"]
        assert sum(logprobs["token_logprobs"]) == pytest.approx(beam.cum_logprob, abs=1e-3)
        assert len(logprobs["tokens"]) == len(choice["token_ids"]) and all(len(t) >= 2 for t in logprobs["top_logprobs"])
    assert answer["usage"]["completion_tokens"] == sum(len(b.tokens) - len(prompt) for b in want.sequences)
    status, answer = ask(llm, COMPLETIONS, {**body, "n": 1, "best_of": 3, "echo": True})
    assert [c["text"] for c in answer["choices"]] == [want.sequences[0].text]


def test_beams_of_a_chat_end_where_the_model_ends(llm):
    body = {"messages": QUESTION, "use_beam_search": True, "n": 2, "max_tokens": 40}
    status, answer = ask(llm, CHAT, body)
    assert status == 200, answer
    best = answer["choices"][0]
    assert best["finish_reason"] == "stop" and "5" in best["message"]["content"]
    assert answer["choices"][1]["message"]["content"] != best["message"]["content"]
    _, special = ask(llm, CHAT, {**body, "include_stop_str_in_output": True, "skip_special_tokens": False, "n": 1})
    assert special["choices"][0]["message"]["content"].endswith(("<|im_end|>", "<|endoftext|>"))
    _, several = ask(llm, COMPLETIONS, {"prompt": ["a", "b"], "use_beam_search": True, "n": 2, "max_tokens": 3})
    assert [c["index"] for c in several["choices"]] == [0, 1, 2, 3]


def test_beams_without_room_are_refused_and_max_tokens_is_cut_to_the_context(llm):
    status, answer = ask(llm, COMPLETIONS, {"prompt": [5] * 256, "use_beam_search": True})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    body = {"messages": [{"role": "user", "content": "a " * 100}], "use_beam_search": True, "ignore_eos": True}
    status, answer = ask(llm, CHAT, body)
    assert status == 200 and answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_gone_client_ends_the_search(llm):
    async def main():
        async with AsyncClient(llm._own.background._cores[0].address) as client:
            api = http.Api(client)
            wire = api.wire()
            body = {"prompt": "The cat", "use_beam_search": True, "n": 8, "max_tokens": 200, "ignore_eos": True}
            wire.feed(api.encode("POST", COMPLETIONS, body))
            while client.num_requests < 8:  # its second step
                await asyncio.sleep(0)
            wire.connection.connection_lost(None)
            await asyncio.sleep(0)
            assert not client.num_requests
            client._dispatcher.check()

    asyncio.run(main())


def test_best_of_is_the_best_of_the_same_samples(llm):
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 6}
    (all_of_them,) = llm.generate("The cat", SamplingParams(n=4, logprobs=0, **sampling))
    best = max(all_of_them.outputs, key=lambda o: o.cumulative_logprob / len(o.token_ids))
    status, answer = ask(llm, COMPLETIONS, {"prompt": "The cat", "best_of": 4, **sampling})
    assert status == 200 and [c["text"] for c in answer["choices"]] == [best.text]
    assert answer["usage"]["completion_tokens"] == sum(len(o.token_ids) for o in all_of_them.outputs)


def test_a_prefix_that_is_not_to_be_read_is_computed(llm):
    body = {"prompt": "One day a little dog went to the park. " * 6, "max_tokens": 1}
    cached = []
    for extra in ({}, {}, {"skip_reading_prefix_cache": True}):
        _, answer = ask(llm, COMPLETIONS, {**body, **extra})
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[1] > 0 == cached[2]
