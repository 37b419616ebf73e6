"""A GPU's kernels of speculation beneath a whole engine, in Triton's interpreter: tokens are those of a CPU without drafts."""

import sys

import pytest
from drafters import DrafterOfTexts, drafting
from eagle3_heads import assert_right, head_of, note_drafts
from inline_engine import InlineEngine
from tiny_models import ALL_MODELS, VOCAB_SIZE, tiny_model

from quire.ipc.sampling import SamplingParams
from quire.ipc.speculative_config import SpeculativeConfig

EOS = 7  # an id that outputs happen to have
SIZES = {"max_num_seqs": 3, "budget": 24, "block_size": 16, "max_model_len": 64, "eos": (EOS,)}
KINDS = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4, "logprobs": 0},
    {"temperature": 0.7, "seed": 6, "bad_words_token_ids": [[30], [31, 32]], "min_tokens": 5, "ignore_eos": False},
    {"temperature": 1.1, "seed": 7, "min_p": 0.02, "max_tokens": 5},
    {"temperature": 0.0, "frequency_penalty": 0.6, "logit_bias": {11: 2.0}},
)


def outputs_of(engine, count):
    for i, params in enumerate(KINDS[:count]):
        part = [(7 * i + 3 * k * k) % 400 + 4 for k in range(4 + 2 * i)]
        engine.add(part + part, SamplingParams(**{"max_tokens": 3 * count, "ignore_eos": True, **params}))
    return engine.run()


def compare(family, drafter, window, padded, count, monkeypatch):
    from interpreted_engine import InterpretedEngine, emulate_gpu

    emulate_gpu(monkeypatch)
    plain = InlineEngine(tiny_model(family), **SIZES)
    want = outputs_of(plain, count)
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3, "enable_adaptive_verification": False}
    own = {"method": "draft_model", "model": str(tiny_model(drafter))} if drafter in ALL_MODELS else {"method": "ngram"}
    config = SpeculativeConfig(num_speculative_tokens=window - 1, **own, **lookup)
    engine = InterpretedEngine(tiny_model(family), **SIZES, speculation=config, padded=padded)
    if drafter not in ("ngram", *ALL_MODELS):
        prompts = [[(7 * i + 3 * k * k) % 400 + 4 for k in range(4 + 2 * i)] * 2 for i in range(count)]
        texts = [[*prompt, *want[i + 1 << 8]] for i, prompt in enumerate(prompts)]
        draft_of = drafting(drafter, texts, EOS, VOCAB_SIZE)
        engine.runner.device.drafter = DrafterOfTexts(engine.runner.ctx.cache, 0, draft_of)
    assert outputs_of(engine, count) == want
    for key, values in plain.logprobs.items():
        assert engine.logprobs[key] == pytest.approx(values, abs=1e-4)
    stats = engine.scheduler.counters.windows.so_far()
    assert stats.draft_tokens > 0
    if padded:  # whether mixed, whether with windows
        assert {(False, True), (True, False)} <= engine.runner.graphs.seen and (
            count < 3 or (True, True) in engine.runner.graphs.seen
        )
    return stats


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which warns of infinities
@pytest.mark.parametrize(
    ("family", "drafter", "window", "padded", "count"),
    [
        ("llama", "some", 3, True, 2),
        pytest.param("llama", "some", 4, True, 5, marks=pytest.mark.slow),
        pytest.param("llama", "ngram", 16, False, 5, marks=pytest.mark.slow),
        pytest.param("llama", "right", 8, True, 5, marks=pytest.mark.slow),
        pytest.param("llama", "outside", 2, False, 5, marks=pytest.mark.slow),
        pytest.param("qwen2-mixed", "ngram", 4, True, 5, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "right", 4, True, 5, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "random", 16, False, 5, marks=pytest.mark.slow),
        pytest.param("gpt-oss", "some", 8, True, 5, marks=pytest.mark.slow),
        pytest.param("llama", "llama", 4, True, 5, marks=pytest.mark.slow),
        pytest.param("qwen2-mixed", "qwen2-mixed", 8, True, 5, marks=pytest.mark.slow),
        pytest.param("llama", "deepseek-v3", 3, False, 5, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "deepseek-v3", 4, False, 3, marks=pytest.mark.slow),
        pytest.param("qwen3.5", "some", 4, True, 2, marks=pytest.mark.slow),
        pytest.param("qwen3.5", "right", 16, False, 5, marks=pytest.mark.slow),
        pytest.param("kimi-linear", "some", 8, True, 3, marks=pytest.mark.slow),
        pytest.param("nemotron-h", "random", 4, True, 3, marks=pytest.mark.slow),
        pytest.param("lfm2", "some", 4, True, 3, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_drafts(family, drafter, window, padded, count, monkeypatch):
    stats = compare(family, drafter, window, padded, count, monkeypatch)
    if drafter == "right":
        assert sum(stats.accepted_by_place) > 0.5 * stats.draft_tokens
    if drafter == family:  # a draft model that is the target: what it drafts is right, but for ties
        assert sum(stats.accepted_by_place) > 0.9 * stats.draft_tokens


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("padded", [True, False])
def test_an_eagle3_head_computes_what_the_reference_does(padded, tmp_path, monkeypatch):
    from interpreted_engine import InterpretedEngine, emulate_gpu

    emulate_gpu(monkeypatch)
    head = head_of(draft_vocab=300)
    config = SpeculativeConfig(
        method="eagle3", model=str(head.save(tmp_path)), num_speculative_tokens=3, enable_adaptive_verification=False
    )
    plain = InlineEngine(tiny_model("llama"), **SIZES)
    engine = InterpretedEngine(tiny_model("llama"), **SIZES, speculation=config, padded=padded)
    found = note_drafts(engine)
    assert outputs_of(engine, 3) == outputs_of(plain, 3)
    assert_right(found, head, "llama")


PASS = ["_missing_kernel", "_layout_kernel", "_tokens_kernel", "linear", "_read_kernel", "_keep_kernel", "embedding", "norm"]
PASS += ["norm", "cat", "linear", "_rope_kv_kernel"]
NAMES = {"mkldnn._linear_pointwise": "linear", "aten.embedding": "embedding", "aten.linalg_vector_norm": "norm"}
NO_LAUNCH = {"select", "slice", "unflatten", "empty", "view", "addcmul", "rsqrt_", "mul", "mul_"}  # or a part of a norm


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_head_that_drafts_nothing_reads_a_step_by_few_launches(tmp_path, monkeypatch):
    from interpreted_engine import InterpretedEngine, emulate_gpu
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime.interpreter import GridExecutor

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            *place, name, _ = str(function).split(".")
            if name not in NO_LAUNCH and not is_inside:
                names.append(NAMES.get(".".join((*place, name)), name))
            return function(*args, **(kwargs or {}))

    def note(frame, event, _):
        if frame.f_code is not launch:
            return
        if event == "call":
            names.append(frame.f_locals[launch.co_varnames[0]].fn.__name__)
            is_inside.append(True)  # of a kernel's interpretation
        elif event == "return":
            is_inside.pop()

    emulate_gpu(monkeypatch)
    config = SpeculativeConfig(method="eagle3", model=str(head_of().save(tmp_path)), num_speculative_tokens=3)
    engine = InterpretedEngine(tiny_model("llama"), **SIZES, speculation=config, padded=True)
    names, is_inside, passes, launch, drafter = [], [], [], GridExecutor.__call__.__code__, engine.runner.device.drafter
    run = drafter.run

    def traced(some, *rest):
        names.clear()
        sys.setprofile(note)
        with Launches():
            run(some, *rest)
        sys.setprofile(None)
        passes.append((some.depth, some.tokens, list(names)))

    drafter.run = traced
    engine.generate([[4, 5, 6]], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    assert passes[-1] == (0, 2, PASS)
