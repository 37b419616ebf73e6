"""Candidates for a request's one token: the model's own likeliest, beside any others' work; what cannot be is refused."""

import numpy as np
import pytest
import torch
from inline_engine import InlineEngine
from tiny_models import reference, tiny_model

from quire.enginecore.tenants.backlog import Room
from quire.ipc.messages.frontend import AddRequest, Candidates, Generate, RequestError, TokenInputs
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.sections import MAX_CANDIDATES
from quire.workers.outputs.candidates import CANDIDATE_ROWS

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(4, 54)), [9] * 17]


def request(engine: InlineEngine, prompt: list[int], candidates: Candidates, params=ONE, owner=0, **more):
    engine.count += 1
    data = np.asarray(prompt, np.int32).tobytes()
    return engine.intake.accept(
        owner, AddRequest(0, engine.count, TokenInputs(data), Generate(params, candidates), **more), Room()
    )


def add(engine: InlineEngine, prompt: list[int], num: int, search: int = 1, **more) -> None:
    (seq,) = request(engine, prompt, Candidates(num, search), **more)
    engine.scheduler.add(seq)


@torch.inference_mode()
def assert_likeliest(prompt: list[int], row, num: int) -> None:
    logprobs = reference("llama")(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    want, ids = logprobs.topk(num)
    assert row.top_ids.shape == row.top_logprobs.shape == (1, num)
    torch.testing.assert_close(row.top_logprobs[0], want, atol=2e-4, rtol=0)
    torch.testing.assert_close(logprobs[row.top_ids[0].long()], want, atol=2e-4, rtol=0)  # of equal ones any comes first
    assert set(ids[: num // 2].tolist()) <= set(row.top_ids[0].tolist())


def test_candidates_are_the_likeliest_tokens_in_any_company_and_in_chunks():
    engine = InlineEngine(tiny_model("llama"), budget=32)
    sampled = engine.add([8, 9, 10], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    for prompt, num in zip(PROMPTS, (6, MAX_CANDIDATES, 2), strict=True):
        add(engine, prompt, num)
    outputs = engine.run()
    assert len(outputs[sampled << 8]) == 9
    rows = sorted(engine.prompt_rows, key=lambda row: row.top_ids.shape[1])
    assert len(rows) == 3
    for row, (prompt, num) in zip(rows, [(PROMPTS[2], 2), (PROMPTS[0], 6), (PROMPTS[1], MAX_CANDIDATES)], strict=True):
        assert_likeliest(prompt, row, num)


def test_a_prefix_in_the_cache_changes_nothing():
    engine = InlineEngine(tiny_model("llama"))
    for _ in range(2):
        add(engine, PROMPTS[1], 8)
        engine.run()
    first, second = engine.prompt_rows
    torch.testing.assert_close(first.top_logprobs, second.top_logprobs, atol=2e-4, rtol=0)
    assert_likeliest(PROMPTS[1], second, 8)


def test_a_step_without_candidates_has_no_side_results():
    engine = InlineEngine(tiny_model("llama"))
    engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=3, logprobs=5))
    assert engine.prompt_rows == []


@pytest.mark.parametrize(
    ("candidates", "params", "says"),
    [
        (Candidates(0, 1), {}, "between 1 and 128"),
        (Candidates(MAX_CANDIDATES + 1, 1), {}, "between 1 and 128"),
        (Candidates(-(2**60), 1), {}, "between 1 and 128"),
        (Candidates(4, 1), {"n": 2}, "n = 1"),
        (Candidates(4, 1), {"max_tokens": 2}, "max_tokens = 1"),
        (Candidates(4, 1), {"max_tokens": None}, "max_tokens = 1"),
        (Candidates(4, 1), {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_is_refused(candidates, params, says):
    engine = InlineEngine(tiny_model("llama"))
    refused = request(engine, [5, 6], candidates, SamplingParams(**{"max_tokens": 1, **params}))
    assert isinstance(refused, RequestError) and refused.code == "invalid" and says in refused.message


def root(engine: InlineEngine, search: int, owner: int = 0, salt: str = "") -> bytes:
    (seq,) = request(engine, [5, 6], Candidates(4, search), owner=owner, cache_salt=salt)
    return seq.blocks.root_hash


def test_without_a_prefix_cache_a_search_shares_with_itself_alone():
    engine = InlineEngine(tiny_model("llama"), enable_prefix_caching=False)
    roots = [root(engine, 1), root(engine, 2), root(engine, 1, owner=1), root(engine, 1, salt="s")]
    assert len(set(roots)) == 4 and roots[0] == root(engine, 1)
    cached = InlineEngine(tiny_model("llama"))
    assert root(cached, 1) == root(cached, 2, owner=1) != root(cached, 1, salt="s")


def test_more_rows_than_are_copied_at_once():
    engine = InlineEngine(tiny_model("llama"), max_num_seqs=80)
    prompts = [[5 + i, 6, 7 + i] for i in range(CANDIDATE_ROWS + 6)]
    for i, prompt in enumerate(prompts):
        add(engine, prompt, 2 + i)
    engine.run()
    rows = sorted(engine.prompt_rows, key=lambda row: row.top_ids.shape[1])
    for i in (0, CANDIDATE_ROWS - 1, CANDIDATE_ROWS, len(prompts) - 1):
        assert_likeliest(prompts[i], rows[i], 2 + i)
