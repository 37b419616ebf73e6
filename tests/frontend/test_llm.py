"""LLM with the real engine and the bundled model, on the CPU: the same answers in any batch, each parameter does its work."""

import asyncio
import gzip
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.client import Client
from quire.frontend.client.llm import LLM
from quire.frontend.client.stream import TooLong
from quire.ipc.sampling import RequestOutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = ["Once upon a time", "The cat", "The", "A dog and a bird went", "One day, a little girl"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "new"


@pytest.fixture(scope="module")
def llm(traces: Path) -> Iterator[LLM]:
    options = {"max_model_len": 256, "max_num_seqs": 8, "cpu_kv_cache_gib": 0.05, "profile_dir": str(traces)}
    with LLM(device="cpu", dtype="float32", **options) as llm:
        yield llm


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    batch = llm.generate(PROMPTS, GREEDY)
    assert [o.prompt for o in batch] == PROMPTS
    for prompt, output in zip(PROMPTS, batch, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        ids, decode = output.prompt_token_ids, partial(llm.get_tokenizer().decode, skip_special_tokens=True)
        text = decode([*ids, *output.outputs[0].token_ids]).removeprefix(decode(ids))
        assert alone.outputs[0].text == output.outputs[0].text == text


def test_a_batch_begins_together(llm: LLM) -> None:
    """Its prompts are computed in one step if they fit, so their first tokens come in one message."""
    for _ in range(5):
        batch = llm.generate([[5, 6, 7], [8]] * 2, GREEDY)  # with room beside what may not have left yet
        assert len({o.metrics.first_token_time for o in batch if o.metrics}) == 1


def test_of_a_batch_the_engine_knows_that_nobody_reads_tokens_one_by_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, submit = [], Client.submit

    def noted(client, ids, params, **options):
        sent.append(params)
        return submit(client, ids, params, **options)

    monkeypatch.setattr(Client, "submit", noted)
    own = SamplingParams(temperature=0.0, max_tokens=2, output_kind=RequestOutputKind.DELTA)
    (first, *_) = llm.generate(PROMPTS[:3], [GREEDY, own, GREEDY])
    assert len(first.outputs[0].token_ids) == GREEDY.max_tokens
    assert [(p.output_kind, p.max_tokens) for p in sent] == [(RequestOutputKind.FINAL_ONLY, n) for n in (8, 2, 8)]
    assert sent[0] is sent[2] and own.output_kind is RequestOutputKind.DELTA  # the caller's own stays as it was


def test_a_seed_repeats_and_children_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=8)
    first, second = (llm.generate("The", params)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) > 1


def test_a_stop_string_cuts_the_text_and_the_tokens(llm: LLM) -> None:
    (plain,) = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=12))
    text = plain.outputs[0].text
    stop = text[len(text) // 2 :][:4]
    (cut,) = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=12, stop=[stop]))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    kept = cut.outputs[0].token_ids
    assert kept == plain.outputs[0].token_ids[: len(kept)]


def test_a_stop_token_ends_the_sequence(llm: LLM) -> None:
    (plain,) = llm.generate("Once upon a time", GREEDY)
    stop = plain.outputs[0].token_ids[2]
    end = plain.outputs[0].token_ids.index(stop)
    (cut,) = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=[stop]))
    assert cut.outputs[0].token_ids == plain.outputs[0].token_ids[: end + 1]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert plain.outputs[0].text.startswith(cut.outputs[0].text)


def test_logprobs_belong_to_the_sampled_tokens(llm: LLM) -> None:
    (output,) = llm.generate("The cat", SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2))
    completion = output.outputs[0]
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    for token, row in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(row) == 3 and row[token].rank == 1
        assert row[token].logprob == max(p.logprob for p in row.values()) <= 0.0
        assert row[token].decoded_token == llm.get_tokenizer().decode([token])
    total = sum(r[t].logprob for t, r in zip(completion.token_ids, completion.logprobs, strict=True))
    assert math.isclose(total, completion.cumulative_logprob, abs_tol=1e-5)
    rows = output.prompt_logprobs
    assert rows is not None and rows[0] is None and len(rows) == len(output.prompt_token_ids)
    assert all(row is not None and token in row for token, row in zip(output.prompt_token_ids[1:], rows[1:], strict=True))


def test_bad_words_never_come(llm: LLM) -> None:
    (plain,) = llm.generate("Once upon a time", GREEDY)
    word = plain.outputs[0].text.split()[0]
    (other,) = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=8, bad_words=[word]))
    assert other.outputs[0].token_ids[0] != plain.outputs[0].token_ids[0]


def test_a_prefix_is_found_again(llm: LLM) -> None:
    prompt = "One day a little dog went to the park. " * 6
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (second.num_cached_tokens or 0) > 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_the_context_is_the_end_and_beyond_it_is_an_error(llm: LLM) -> None:
    (output,) = llm.generate([[5] * 250], SamplingParams(max_tokens=1000, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")
    with pytest.raises(TooLong, match="256 tokens"):
        llm.generate([[5] * 256], GREEDY)


def test_a_chat_gets_an_answer(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)
    assert output.prompt is not None and "Hello" in output.prompt and output.outputs[0].token_ids


def test_an_async_client_can_share_the_engine(llm: LLM) -> None:
    async def run() -> str:
        async with AsyncClient(llm._own.background._cores[0].address) as client:
            outputs = [o async for o in client.generate("Once upon a time", GREEDY)]
            return outputs[-1].outputs[0].text

    assert asyncio.run(run()) == llm.generate("Once upon a time", GREEDY)[0].outputs[0].text


def test_a_profile_is_a_trace_of_every_worker(llm: LLM, traces: Path) -> None:
    with pytest.raises(ValueError, match="no profiling is under way"):
        llm.stop_profile()
    for _ in range(2):
        llm.start_profile()
        with pytest.raises(ValueError, match="under way already"):
            llm.start_profile()
        llm.generate("Once", GREEDY)
        (name,) = llm.stop_profile()
        with gzip.open(traces / name) as file:
            events = json.load(file)["traceEvents"]
        assert any(event.get("name", "").startswith("aten::") for event in events)


def test_an_emptied_prefix_cache_is_empty(llm: LLM) -> None:
    def cached() -> int | None:
        (output,) = llm.generate([[7] * 40], GREEDY)
        return output.num_cached_tokens

    cached()
    assert cached() == 32
    assert llm.reset_prefix_cache() and cached() == 0 and cached() == 32
