"""fp32 on the CPU: whatever is drafted and however steps are scheduled, every request has the tokens that it has without it.

One run has requests with sampling parameters of every kind side by side, so each kind meets each value of FACTORS. Runs
differ in these; every pair of values of two factors is in at least one case. Grammars: enginecore/grammar/test_windows.py.
"""

import functools
import json
import shutil
from itertools import combinations
from typing import Any

import pytest
from drafters import DrafterOfTexts, drafting
from eagle3_heads import head_of
from inline_engine import InlineEngine
from thread_ranks import engine_of_ranks
from tiny_models import VOCAB_SIZE, root, tiny_model

from quire.ipc.messages.workers import FullAttention
from quire.ipc.sampling import SamplingParams
from quire.ipc.speculative_config import SpeculativeConfig
from quire.workers.models.config import ModelConfigError
from quire.workers.runner import ModelRunner

MAX_LEN, EOS = 96, 7  # EOS: an id that outputs happen to have
FACTORS = {
    "family": ["llama", "qwen2-mixed", "deepseek-v3", "gemma3", "gpt-oss", "bloom"],
    "drafter": ["ngram", "right", "wrong", "some", "random", "eos", "outside", "itself", "another model", "head"],
    "window": [2, 4, 8, 16],
    "scheduling": ["plain", "chunks", "preemption", "one step in flight", "small blocks", "few samples", "hits"],
}
SCHEDULING = {
    "plain": {},
    "chunks": {"budget": 24},
    "preemption": {"num_blocks": 22, "look_ahead": False},
    "one step in flight": {"depth": 1},
    "small blocks": {"block_size": 4, "num_blocks": 500},
    "few samples": {"max_num_seqs": 3},
    "hits": {},  # all requests come twice, and the second time what they share is found in the cache
    "few rows": {"budget": 7},  # they take turns
}


def pairs(factors: dict[str, list[Any]]) -> list[tuple[str, str, int, str]]:
    """Few cases with every pair of values, found greedily."""
    names = list(factors)
    left = {(a, x, b, y) for a, b in combinations(names, 2) for x in factors[a] for y in factors[b]}
    cases = []
    while left:
        case: dict[str, object] = {}
        a, x, b, y = min(left, key=lambda pair: (names.index(pair[0]), names.index(pair[2]), str(pair)))
        case[a], case[b] = x, y
        for name in names:
            if name not in case:
                case[name] = max(factors[name], key=lambda value: len(_covered({**case, name: value}) & left))
        left -= _covered(case)
        cases.append(tuple(case[name] for name in names))
    return cases


def _covered(case: dict[str, object]) -> set[tuple[object, ...]]:
    names = [name for name in FACTORS if name in case]
    return {(a, case[a], b, case[b]) for a, b in combinations(names, 2)}


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts that repeat themselves, with parameters of all kinds."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.8, "seed": 5, "logprobs": 0},
        {"temperature": 1.0, "top_p": 0.9, "seed": 6, "n": 2},
        {"temperature": 1.2, "min_p": 0.05, "top_k": 40, "seed": 7},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 8, "logprobs": 1},
        {"temperature": 0.0, "frequency_penalty": 0.7},
        {"temperature": 0.9, "logit_bias": {11: 3.0, 12: -100.0, 13: 2.0}, "seed": 9},
        {"temperature": 0.0, "bad_words_token_ids": [[30], [31, 32], [40, 41, 42]], "repetition_penalty": 0.8},
        {
            "temperature": 0.6,
            "min_tokens": 12,
            "seed": 10,
            "ignore_eos": False,
            "stop_token_ids": [17, 18, 19, *range(100, 200)],
        },
        {"temperature": 0.9, "seed": 11, "ignore_eos": False, "stop_token_ids": [*range(200, 240)]},
        {"temperature": 0.9, "allowed_token_ids": [3, 4, 5, 6, 8], "seed": 12, "max_tokens": 9},
        {"temperature": 0.0, "max_tokens": 1},
        {"temperature": 0.0, "max_tokens": 2},
        {"temperature": 0.0, "max_tokens": 200},  # to the end of the context
    ]
    asked = []
    for i, params in enumerate(kinds):
        part = [(7 * i + 3 * k * k) % 400 + 4 for k in range(3 + 2 * i)]
        prompt = (part + part + part[: 1 + i % 3])[-44:]
        asked.append((prompt, SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **params})))
    return asked


def outputs_of(engine: InlineEngine) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    for prompt, params in requests():
        engine.add(prompt, params)
    return engine.run(), engine.logprobs


@functools.cache
def without_drafts(family: str) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    return outputs_of(InlineEngine(tiny_model(family), max_model_len=MAX_LEN, eos=(EOS,)))


def texts_of(family: str) -> list[list[int]]:
    outputs, _ = without_drafts(family)
    return [[*prompt, *outputs[key]] for key, (prompt, _) in ((i + 1 << 8, r) for i, r in enumerate(requests()))]


def config(window: int, **more) -> SpeculativeConfig:
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    how = {"method": "ngram", "num_speculative_tokens": window - 1, "enable_adaptive_verification": False}
    return SpeculativeConfig(**{**how, **lookup, **more})


def draft_model(name: str, window: int, **more) -> SpeculativeConfig:
    return config(window, **{"method": "draft_model", "model": str(tiny_model(name)), **more})


def outputs_again(engine: InlineEngine) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    """The outputs of all requests that come a second time, with the keys of the first time."""
    outputs_of(engine)
    cached, first = engine.scheduler.counters.cached_tokens, engine.count
    engine.logprobs.clear()
    outputs, logprobs = outputs_of(engine)
    assert engine.scheduler.counters.cached_tokens > cached + 100
    return {k - (first << 8): v for k, v in outputs.items()}, {k - (first << 8): v for k, v in logprobs.items()}


@functools.cache
def head(family: str) -> str:
    """The folder of an EAGLE-3 head with random weights."""
    return str(head_of(family, draft_vocab=300).save(root() / f"speculation-head-{family}"))


def engine_with(family: str, drafter: str, window: int, **how) -> InlineEngine:
    models = {"itself": family, "another model": "deepseek-v3" if family == "gemma3" else "gemma3"}
    speculation = draft_model(models[drafter], window) if drafter in models else config(window)
    if drafter == "head":
        speculation = config(window, method="eagle3", model=head(family))
    engine = InlineEngine(tiny_model(family), **{"max_model_len": MAX_LEN, "eos": (EOS,), "speculation": speculation, **how})
    if drafter not in ("ngram", "head", *models):
        hold(engine.runner, family, drafter)
    return engine


def hold(runner: ModelRunner, family: str, drafter: str) -> None:
    cache = runner.ctx.cache
    group = next(i for i, kind in enumerate(cache.kinds) if isinstance(kind, FullAttention))
    runner.device.drafter = DrafterOfTexts(cache, group, drafting(drafter, texts_of(family), EOS, VOCAB_SIZE))


def assert_equal(got, want) -> None:
    (outputs, logprobs), (expected, expected_logprobs) = got, want
    assert outputs == expected
    for key, values in expected_logprobs.items():
        assert logprobs[key] == pytest.approx(values, abs=1e-4)


ALWAYS = 8
CASES = [case if i < ALWAYS else pytest.param(*case, marks=pytest.mark.slow) for i, case in enumerate(pairs(FACTORS))]
# The same for models with recurrent layers: each kind of recurrence, and one beside attention.
RECURRENT = {
    **FACTORS,
    "family": ["qwen3.5", "kimi-linear", "nemotron-h", "lfm2", "falcon-h1"],
    "drafter": ["ngram", "right", "wrong", "some", "random", "eos"],
    "scheduling": [*[how for how in FACTORS["scheduling"] if how != "hits"], "few rows"],
}
RECURRENT_CASES = [case if i < 5 else pytest.param(*case, marks=pytest.mark.slow) for i, case in enumerate(pairs(RECURRENT))]


@pytest.mark.parametrize(("family", "drafter", "window", "scheduling"), [*CASES, *RECURRENT_CASES])
def test_tokens_are_those_without_drafts(family, drafter, window, scheduling):
    engine = engine_with(family, drafter, window, **SCHEDULING[scheduling])
    assert_equal((outputs_again if scheduling == "hits" else outputs_of)(engine), without_drafts(family))
    stats = engine.scheduler.counters.windows.so_far()
    assert stats.draft_tokens > 0
    if drafter == "right":
        assert sum(stats.accepted_by_place) > 0.5 * stats.draft_tokens
    if drafter == "itself":
        assert sum(stats.accepted_by_place) >= 0.99 * stats.draft_tokens
    if drafter == "wrong":
        assert sum(stats.accepted_by_place) < 0.05 * stats.draft_tokens
    if scheduling == "preemption":
        assert engine.scheduler.counters.preemptions


@pytest.mark.parametrize("factors", [FACTORS, RECURRENT])
def test_every_pair_is_in_a_case(factors):
    covered = set().union(*(_covered(dict(zip(factors, case, strict=True))) for case in pairs(factors)))
    assert len(covered) == sum(len(factors[a]) * len(factors[b]) for a, b in combinations(factors, 2))


def test_a_revisited_prefix_is_hit_whole_and_drafted_from():
    """Text is kept by block of the cache: the second of two equal requests computes little, and has as many drafts accepted."""
    plain, drafted = (InlineEngine(tiny_model("llama"), speculation=c) for c in (None, config(8)))
    part = [(5 * k * k) % 400 + 4 for k in range(20)]
    prompt, params = part * 4, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    cached, accepted, turns = [], [], []
    for engine in (plain, drafted):
        for _ in range(2):
            (output,) = engine.generate([prompt], params)
            counters = engine.scheduler.counters
            cached.append(counters.cached_tokens)
            accepted.append(sum(stats.accepted_by_place) if (stats := counters.windows.so_far()) else 0)
        engine.generate([prompt + output], params)  # hits what decode rows have computed, too
        turns.append((output, counters.cached_tokens - cached[-1]))
    assert turns[0] == turns[1] and turns[0][1] == 128
    assert cached == [0, 64, 0, 64]
    assert accepted[2] > 0 and accepted[3] == 2 * accepted[2]


def test_blocks_that_windows_fill_are_hit():
    """Each step has 16 tokens, and begins within a block: no length is a multiple of a block's."""
    prompt, params = list(range(4, 81)), SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
    (output,) = InlineEngine(tiny_model("llama")).generate([prompt], params)
    engine = InlineEngine(tiny_model("llama"), speculation=config(16))
    cache = engine.runner.ctx.cache
    engine.runner.device.drafter = DrafterOfTexts(cache, 0, drafting("right", [prompt + output], EOS, VOCAB_SIZE))
    assert engine.generate([prompt], params) == [output]
    engine.generate([prompt + output], params)
    assert engine.scheduler.counters.cached_tokens == (len(prompt + output) - 1) // 16 * 16


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("llama", "ngram"),
        ("llama", "some"),
        ("llama", "itself"),
        ("deepseek-v3", "some"),
        ("gemma3", "some"),
        ("gpt-oss", "ngram"),
    ],
)
def test_ranks_accept_alike(family, drafter):
    speculation = draft_model(family, 8) if drafter == "itself" else config(8)
    engine = engine_of_ranks(tiny_model(family), 2, max_model_len=MAX_LEN, eos=(EOS,), speculation=speculation)
    if drafter == "some":
        for runner in engine.runner.runners:
            hold(runner, family, drafter)
    for prompt, params in requests():
        if params.logprobs is None:
            engine.add(prompt, params)
    outputs = engine.run()
    wanted = [params for _, params in requests()]
    expected, _ = without_drafts(family)
    names = [i + 1 for i, params in enumerate(wanted) if params.logprobs is None]
    renamed = {names[(key >> 8) - 1] << 8 | key & 255: tokens for key, tokens in outputs.items()}
    assert renamed == {key: tokens for key, tokens in expected.items() if key >> 8 in names}
    stats = engine.scheduler.counters.windows.so_far()
    assert sum(stats.accepted_by_place) >= (0.99 * stats.draft_tokens if drafter == "itself" else 1)


def test_drafts_that_are_never_right_are_soon_only_tried():
    engine = InlineEngine(
        tiny_model("llama"), speculation=SpeculativeConfig(method="ngram", num_speculative_tokens=4), max_model_len=400
    )
    hold(engine.runner, "llama", "outside")
    params = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    engine.generate([[4, 5, 6]], params)
    assert engine.scheduler.counters.windows.so_far().num_drafts < 45  # 32 steps, those in flight then, and one in 64


@pytest.mark.slow
def test_position_40000_accepts_as_the_start(tmp_path):
    """A draft model that is the model itself is right at both, but for near ties: its text, entries and positions go so far."""
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 65536})
    )
    sizes = {"max_model_len": 40200, "num_blocks": 1300, "block_size": 64, "budget": 4096, "max_num_seqs": 2}
    speculation = config(5, method="draft_model", model=str(folder))
    engine, part = InlineEngine(folder, **sizes, speculation=speculation), [(5 * k * k) % 400 + 4 for k in range(50)]
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=1, ignore_eos=True)
    for length in (40, 40_000):
        before = engine.scheduler.counters.windows.so_far()
        engine.generate([(part * 800)[:length]], params)
        after = engine.scheduler.counters.windows.so_far()
        drafts = after.draft_tokens - before.draft_tokens
        assert sum(after.accepted_by_place) - sum(before.accepted_by_place) >= 0.99 * drafts > 40


def test_a_model_without_full_attention_is_refused():
    with pytest.raises(ModelConfigError, match="speculative-config needs a layer of full attention"):
        InlineEngine(tiny_model("mistral-sliding"), speculation=config(4))


def test_synthetic_acceptance_has_the_rates_that_were_asked_for():
    """Of each place, drafts before it included; the same seeds give the same tokens again."""
    rates = [0.9, 0.5, 0.5, 0.1]
    outputs = []
    for _ in range(2):
        engine = InlineEngine(tiny_model("llama"), speculation=config(5, synthetic_acceptance_rates=rates))
        cache = engine.runner.ctx.cache
        engine.runner.device.drafter = DrafterOfTexts(cache, 0, lambda text: [text[-1] % 7 + 20, 21, 22, 23])
        params = [SamplingParams(max_tokens=300, temperature=1.0, seed=i, ignore_eos=True) for i in range(8)]
        outputs.append(engine.generate([[4, 5, 6 + i] for i in range(8)], params))
    assert outputs[0] == outputs[1]
    stats = engine.scheduler.counters.windows.so_far()
    assert stats.num_drafts > 600
    got = [accepted / stats.num_drafts for accepted in stats.accepted_by_place[:4]]
    assert got == pytest.approx(rates, abs=0.06)  # of about 750 windows, four standard deviations
