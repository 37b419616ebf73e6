"""On a GPU: whatever is drafted, fp32 tokens are those without drafts, by graphs and eagerly."""

import functools

import pytest
import tiny_hybrids
import torch
from eagle3_heads import assert_right, head_of, note_drafts
from inline_engine import InlineEngine
from mtp_heads import MODELS as MTP_MODELS
from mtp_heads import assert_mtp_right, mtp_model, mtp_of
from tiny_models import tiny_model

from quire.ipc.sampling import SamplingParams
from quire.ipc.speculative_config import SpeculativeConfig
from quire.workers.speculation.drafter import Drafter

pytestmark = pytest.mark.gpu

EOS = 7
KINDS = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4, "logprobs": 0},
    {"temperature": 0.7, "seed": 6, "bad_words_token_ids": [[30], [31, 32]], "min_tokens": 5, "ignore_eos": False},
    {"temperature": 1.1, "seed": 7, "min_p": 0.02, "max_tokens": 5},
    {"temperature": 0.0, "frequency_penalty": 0.6, "logit_bias": {11: 2.0}},
    {"temperature": 0.0, "max_tokens": 300},  # to the end of the context
)
WINDOWS = (2, 4, 16)
HYBRIDS = [f"gpu-{name}" for name in tiny_hybrids.FIRST if name not in tiny_hybrids.WITHOUT_KV_CACHE]


class Hostile(Drafter):
    """As many drafts as there may be, mostly wrong, some outside the vocabulary: by operations that a graph can hold."""

    def extend(self, step, num_tokens):
        pass

    def draft(self, tables, step, num_rows):
        slots = step.row_slots[:num_rows].long()
        ids = tables.last_token[slots][:, None] * 7 + torch.arange(15, device=slots.device, dtype=torch.int32) - 3
        tables.drafts[slots] = ids
        tables.num_drafts.index_fill_(0, slots, 15)


def outputs_of(engine):
    for i, params in enumerate(KINDS * 4):
        part = [(7 * i + 3 * k * k) % 400 + 4 for k in range(4 + i)]
        engine.add(part + part, SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **params}))
    return engine.run(), engine.logprobs


def engine_of(family, dtype=torch.float32, **more):
    return InlineEngine(tiny_model(family), device="cuda", dtype=dtype, max_model_len=128, block_size=16, eos=(EOS,), **more)


@functools.cache
def without_drafts(family):
    return outputs_of(engine_of(family))


def config(window, **drafter):
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3, "enable_adaptive_verification": False}
    return SpeculativeConfig(**{"method": "ngram", "num_speculative_tokens": window - 1, **lookup, **drafter})


def draft_model(name):
    return {"method": "draft_model", "model": str(tiny_model(name))}


def cases():
    """(family, drafter, window, graphs): each family with each drafter and window, by graphs and eagerly, in turn."""
    found = []
    for i, family in enumerate(["gpu-llama", "gpu-qwen2-mixed", "deepseek-v3", "gpu-gpt-oss", *HYBRIDS]):
        for j, drafter in enumerate(["ngram", "hostile", "itself", "another model"]):
            if drafter == "itself" and family in HYBRIDS:
                continue  # a draft model has attention alone
            first = (i + j) % 2 == 0
            found.append((family, drafter, WINDOWS[(i + j) % 3], first))
            if drafter != "another model" or family not in HYBRIDS:
                found.append((family, drafter, WINDOWS[(i + j + 1) % 3], not first))
    return found


@pytest.mark.parametrize(("family", "drafter", "window", "graphs"), cases())
def test_tokens_are_those_without_drafts(family, drafter, window, graphs):
    models = {"itself": family, "another model": "gpu-gemma3"}
    own = draft_model(models[drafter]) if drafter in models else {}
    engine = engine_of(family, speculation=config(window, **own), graphs=False)
    if drafter == "hostile":
        engine.runner.device.drafter = Hostile()
    if graphs:
        with engine.runner.device.stream():
            engine.runner.capture_graphs()
    outputs, logprobs = outputs_of(engine)
    expected, expected_logprobs = without_drafts(family)
    assert outputs == expected
    for key, values in expected_logprobs.items():
        assert logprobs[key] == pytest.approx(values, abs=3e-4)
    stats = engine.scheduler.counters.windows.so_far()
    assert stats.draft_tokens > 0
    if drafter == "itself":
        assert sum(stats.accepted_by_place) >= 0.97 * stats.draft_tokens


@pytest.mark.parametrize("graphs", [False, True])
def test_a_draft_model_knows_prefixes_that_are_hit(graphs):
    engine = engine_of("gpu-llama", speculation=config(5, **draft_model("gpu-llama")), graphs=graphs)
    prompt, params = [(5 * k * k) % 400 + 4 for k in range(70)], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    first = engine.generate([prompt], params)
    assert engine.generate([prompt] * 3, params) == first * 3 and engine.scheduler.counters.cached_tokens >= 3 * 64
    stats = engine.scheduler.counters.windows.so_far()
    assert sum(stats.accepted_by_place) >= 0.97 * stats.draft_tokens > 0


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", ["gpu-llama", "gpu-qwen2-mixed"])
def test_an_eagle3_head_computes_what_the_reference_does(family, graphs, tmp_path):
    """Behind prompts, hits, accepted and rejected drafts. The drafts are noted where passes run eagerly."""
    head = head_of(family, draft_vocab=300)
    engine = engine_of(family, speculation=config(4, method="eagle3", model=str(head.save(tmp_path))), graphs=graphs)
    found = [] if graphs else note_drafts(engine)
    assert outputs_of(engine)[0] == without_drafts(family)[0]
    assert engine.scheduler.counters.windows.so_far().draft_tokens > 0
    if not graphs:
        on_cpu = [(ids, drafts, logits.cpu()) for ids, drafts, logits in found]
        assert_right(on_cpu, head, family)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", MTP_MODELS)
def test_mtp_layers_compute_what_the_reference_does(name, graphs):
    """Behind prompts, hits, accepted and rejected drafts. The drafts are noted where passes run eagerly."""
    folder, how = mtp_model(name, True), {"device": "cuda", "max_model_len": 128, "block_size": 16, "eos": (EOS,)}
    engine = InlineEngine(folder, **how, speculation=config(4, method="mtp", model=str(folder)), graphs=graphs)
    found = [] if graphs else note_drafts(engine)
    assert outputs_of(engine)[0] == outputs_of(InlineEngine(folder, **how))[0]
    assert engine.scheduler.counters.windows.so_far().draft_tokens > 0
    if not graphs:
        assert_mtp_right(found, mtp_of(name, True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits_drafts_of_a_repeating_text_are_accepted(dtype):
    """Tokens may differ by rounding, so only the path is seen: decode attention of several queries a row, by graphs."""
    engine = engine_of("gpu-llama", dtype, speculation=config(8), graphs=True)
    part = list(range(20, 36))
    engine.add(part * 3, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    assert [len(tokens) for tokens in engine.run().values()] == [60]
    stats = engine.scheduler.counters.windows.so_far()
    assert sum(stats.accepted_by_place) > 0
