"""Beam search against a reference that sees every log-probability, in float32, from transformers; and what it costs."""

import asyncio
import functools
from collections.abc import Iterator

import pytest
import torch
import transformers

from quire.enginecore.loading.model_files import BUNDLED
from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.beam_search import MAX_BEAM_WIDTH, BeamSearch, BeamSearchParams
from quire.frontend.client.llm import LLM
from quire.frontend.client.stream import InvalidRequest, TooLong

EOS = {3, 0}
ROUNDING = 2e-4  # of sums over a dozen tokens


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32", max_model_len=256, max_num_seqs=16, cpu_kv_cache_gib=0.05) as llm:
        yield llm


@functools.cache
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()


@torch.inference_mode()
def reference(prompt: list[int], width: int, max_tokens: int, eos: set[int], penalty: float) -> list[tuple[list[int], float]]:
    """(tokens, sum of log-probabilities) of the best beams, by vLLM's rules, with every token a candidate."""
    beams, completed = [(list(prompt), 0.0)], []

    def score(beam):
        tokens, total = beam
        return total / (len(tokens) - (tokens[-1] in eos)) ** penalty

    for _ in range(max_tokens):
        rows = model()(torch.tensor([tokens for tokens, _ in beams])).logits[:, -1].log_softmax(-1)
        extended = []
        for (tokens, total), row in zip(beams, rows, strict=True):
            for token in row.argsort(descending=True)[: 2 * width].tolist():
                (completed if token in eos else extended).append(([*tokens, token], total + row[token].item()))
        beams = sorted(extended, key=score, reverse=True)[:width]
    return sorted([*completed, *beams], key=score, reverse=True)[:width]


def assert_equal(llm: LLM, prompt: str, params: BeamSearchParams) -> None:
    (output,) = llm.beam_search(prompt, params)
    ids = llm.get_tokenizer().encode(prompt)
    eos = set() if params.ignore_eos else EOS
    want = reference(ids, params.beam_width, params.max_tokens, eos, params.length_penalty)
    got = output.sequences
    assert len(got) == len(want) == params.beam_width
    for place, (beam, (_, total)) in enumerate(zip(got, want, strict=True)):
        assert abs(beam.cum_logprob - total) < ROUNDING, place
        same = [t for t, s in want if abs(s - beam.cum_logprob) < ROUNDING]  # of equal ones any may come first
        assert beam.tokens in same, place
        assert beam.finish_reason == ("stop" if beam.tokens[-1] in eos else "length")
        outputs = zip(beam.logprobs, beam.tokens[len(ids) :], strict=True)
        assert abs(sum(row[token].logprob for row, token in outputs) - total) < ROUNDING


@pytest.mark.parametrize(
    ("prompt", "width", "max_tokens", "penalty"),
    [
        ("Question: 3 + 4 = ?\nAnswer:", 4, 12, 1.0),
        ("Once upon a time", 1, 8, 1.0),
        ("The cat", 3, 20, 0.0),
        ("The cat", 5, 12, -1.5),
        ("Hello", 6, 12, 2.0),
        ("One day", 64, 6, 1.0),
    ],
)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_equals_a_reference_over_all_logprobs(llm, prompt, width, max_tokens, penalty, ignore_eos):
    assert_equal(llm, prompt, BeamSearchParams(width, max_tokens, ignore_eos=ignore_eos, length_penalty=penalty))


def chat(llm: LLM, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_beams_end_by_eos_and_the_search_with_them(llm):
    prompt = chat(llm, "What is 2 + 3?")
    params = BeamSearchParams(3, 40, length_penalty=1.0)
    (output,) = llm.beam_search(prompt, params)
    best = output.sequences[0]
    assert best.finish_reason == "stop" and best.stop_reason is None and best.tokens[-1] in EOS
    assert best.text == llm.get_tokenizer().decode(best.tokens[:-1], skip_special_tokens=True)
    assert_equal(llm, prompt, BeamSearchParams(3, 16))


def test_a_stop_token_of_ones_own_completes_a_beam(llm):
    (plain,) = llm.beam_search("The cat", BeamSearchParams(2, 6, ignore_eos=True))
    stop = plain.sequences[0].tokens[-2]
    (output,) = llm.beam_search("The cat", BeamSearchParams(2, 6, ignore_eos=True, stop_token_ids=[stop]))
    ended = [s for s in output.sequences if s.finish_reason == "stop"]
    assert all(s.stop_reason == stop == s.tokens[-1] for s in ended)
    assert all(stop not in s.tokens[:-1] for s in output.sequences)


def test_early_stopping_ends_with_the_first_completed_beams(llm):
    prompt = chat(llm, "What is 2 + 3?")
    (output,) = llm.beam_search(prompt, BeamSearchParams(2, 60, early_stopping=True, length_penalty=0.0))
    assert [s.finish_reason for s in output.sequences] == ["stop", "stop"]


def test_several_prompts_at_once_give_what_each_gives_alone(llm):
    prompts = ["The cat", "Once upon a time", [5, 6, 7]]
    params = BeamSearchParams(3, 6)
    together, alone = llm.beam_search(prompts, params), [llm.beam_search(p, params)[0] for p in prompts]
    for one, other in zip(together, alone, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]


def test_more_beams_than_the_engine_runs_at_once_and_than_the_vocabulary_needs(llm):
    (output,) = llm.beam_search("A", BeamSearchParams(MAX_BEAM_WIDTH, 2))
    assert len(output.sequences) == MAX_BEAM_WIDTH
    scores = [s.cum_logprob / (len(s.tokens) - (s.tokens[-1] in EOS)) for s in output.sequences]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 1e6}, "length_penalty"),
        ({"temperature": -1.0}, "temperature"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
    ],
)
def test_a_bad_parameter_is_named(params, says):
    with pytest.raises(ValueError, match=says):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **params})


def test_what_cannot_run_is_an_error_and_nothing_runs(llm):
    with pytest.raises(TooLong, match="prompt 1"):
        llm.beam_search(["a", [5] * 256], BeamSearchParams(2, 4))
    with pytest.raises(InvalidRequest, match="vocabulary"):
        llm.beam_search([[1 << 20]], BeamSearchParams(2, 4))
    with pytest.raises(ValueError, match="BeamSearchParams"):
        llm.beam_search("a", None)


async def run_searches(address: str, prompt: list[int], **options) -> list[int]:
    """Cached prompt tokens of every request of a search."""
    cached = []
    async with AsyncClient(address) as client:
        search = BeamSearch(client, prompt, BeamSearchParams(4, 4, ignore_eos=True), **options)
        step = search._step

        async def seen():
            found = await step()
            cached.extend(stream.num_cached_tokens for stream in search._streams)
            return found

        search._step = seen
        await search.run()
        assert not client.num_requests
    return cached


def test_beams_share_the_blocks_of_their_prefix(llm):
    """Each computes its last block only, whatever the prompt's length."""
    cached = asyncio.run(run_searches(llm._own.background._cores[0].address, [7, 8, 9] * 30))  # 90 tokens, blocks of 16
    assert cached[0] == 0 and len(cached) == 1 + 3 * 4
    assert set(cached[1:]) == {80}


def test_without_a_prefix_cache_a_search_shares_its_own_blocks_only():
    with LLM(device="cpu", dtype="float32", max_model_len=128, cpu_kv_cache_gib=0.02, enable_prefix_caching=False) as llm:
        for _ in range(2):
            cached = asyncio.run(run_searches(llm._own.background._cores[0].address, [7, 8, 9] * 20))
            assert cached[0] == 0 and set(cached[1:]) == {48}


def test_a_cancelled_search_leaves_nothing_behind(llm):
    async def run():
        async with AsyncClient(llm._own.background._cores[0].address) as client:
            search = BeamSearch(client, [5, 6, 7], BeamSearchParams(4, 200, ignore_eos=True))
            task = asyncio.create_task(search.run())
            while not search._beams.length:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not client.num_requests
            client._dispatcher.check()

    asyncio.run(run())
