"""On a GPU: fp32 output equals transformers' token for token, graphs equal eager steps, decode never waits for the device."""

import copy
import functools

import pytest
import tiny_moe
import torch
from inline_engine import InlineEngine
from test_greedy_equality import is_behind_tie
from tiny_models import GPU_MODELS, WIDE_MODELS, reference, tiny_model

from quire.ipc.sampling import SamplingParams
from quire.ipc.step.sections import HEADER, NO_TOKEN, SAMPLING_MASK

pytestmark = pytest.mark.gpu

NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
TOLERANCE_16_BIT = 0.05  # of the row's logit range: how far below the maximum a 16-bit engine's token may lie in fp32 logits

NAMES = list(GPU_MODELS)
ROUNDING = 1e-4  # of logits of about 4, summed in other orders on the GPU: what lies so near the maximum is equal


@functools.cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 5, 15, 16, 17, 31, 32, 33, 40, 47, 48, 64, 65, 80, 97]
    return [torch.randint(4, 500, (n,), generator=generator).tolist() for n in lengths]


def reference_logits(name, prompt, output):
    with torch.inference_mode():
        return reference(name)(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]


def wrong_rows(name, got):
    """Indices of prompts whose output is not transformers' (on the CPU, fp32) greedy one."""
    wrong = []
    for n, (p, out) in enumerate(zip(prompts(), got, strict=True)):
        logits = reference_logits(name, p, out)
        chosen = logits.gather(1, torch.tensor(out)[:, None])[:, 0]
        scale = max(1.0, float(logits.abs().max()) / 8)
        others = (chosen < logits.max(-1).values - ROUNDING * scale).nonzero()
        if len(others) and not is_behind_tie(name, (*p, *out), len(p) + int(others[0])):
            wrong.append(n)
    return wrong


def below_the_maximum(name, some, got) -> float:
    """How far a chosen token lies below the maximum of transformers' fp32 logits, of the row's range, at most."""
    worst = 0.0
    for p, out in zip(some, got, strict=True):
        logits = reference_logits(name, p, out)
        chosen = logits.gather(1, torch.tensor(out)[:, None])[:, 0]
        highest, lowest = logits.max(-1).values, logits.min(-1).values
        worst = max(worst, float(((highest - chosen) / (highest - lowest)).max()))
    return worst


@functools.cache
def reference_in_16_bits(name):
    return copy.deepcopy(reference(name)).to(torch.bfloat16)


def share_far_below(name, some, got) -> tuple[float, float]:
    """Of how many tokens the choice lies far below fp32's maximum: ours, and transformers' in bfloat16 after the same tokens.

    Where the scores of two experts are near each other, rounding takes the other one, and any token may come of it.
    """
    far = torch.zeros(2)
    for p, out in zip(some, got, strict=True):
        logits = reference_logits(name, p, out)
        with torch.inference_mode():
            rounded = reference_in_16_bits(name)(torch.tensor([[*p, *out[:-1]]])).logits[0, len(p) - 1 :]
        highest, lowest = logits.max(-1, keepdim=True).values, logits.min(-1, keepdim=True).values
        chosen = logits.gather(1, torch.stack([torch.tensor(out), rounded.argmax(-1)], 1))
        far += ((highest - chosen) / (highest - lowest) > TOLERANCE_16_BIT).sum(0)
    return tuple((far / sum(map(len, got))).tolist())


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_fp32_equals_transformers(name, graphs):
    engine = InlineEngine(tiny_model(name), device="cuda", graphs=graphs)
    assert wrong_rows(name, engine.generate(prompts(), GREEDY)) == []
    assert wrong_rows(name, engine.generate(prompts(), GREEDY)) == []  # from the prefix cache
    assert wrong_rows(name, [engine.generate([p], GREEDY)[0] for p in prompts()]) == []


@pytest.mark.parametrize("name", ["gpu-llama", "gpu-qwen2-mixed", "gpu-mistral-sliding", "gpu-qwen3-moe", "gpu-deepseek-v3"])
def test_fp32_equals_transformers_when_chunked_and_preempted(name):
    engine = InlineEngine(tiny_model(name), device="cuda", graphs=True, budget=32)
    assert wrong_rows(name, engine.generate(prompts(), GREEDY)) == []
    engine = InlineEngine(tiny_model(name), device="cuda", graphs=True, budget=64, num_blocks=26, look_ahead=False)
    assert wrong_rows(name, engine.generate(prompts(), GREEDY)) == []
    assert engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpu-llama", "gpu-mistral-sliding", "gpu-qwen2-mixed", "gpu-qwen3"])
def test_16_bit_tokens_are_near_the_maximum_in_fp32(name, dtype):
    engine = InlineEngine(tiny_model(name), device="cuda", dtype=dtype, graphs=True, block_size=64)
    assert below_the_maximum(name, prompts(), engine.generate(prompts(), GREEDY)) < TOLERANCE_16_BIT


def wide_outputs(name, num_rows):
    """(prompts, their tokens) in bfloat16, eager and by graphs."""
    generator = torch.Generator().manual_seed(num_rows)
    some = [torch.randint(4, 500, (1 + 13 * n % 50,), generator=generator).tolist() for n in range(num_rows)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    for graphs in (False, True):
        engine = InlineEngine(
            tiny_model(name), device="cuda", dtype=torch.bfloat16, graphs=graphs, max_num_seqs=128, num_blocks=512
        )
        yield some, engine.generate(some, params)


@pytest.mark.parametrize("num_rows", [3, 20, 40, 60, 100])
@pytest.mark.parametrize("name", [n for n in WIDE_MODELS if n not in tiny_moe.WIDE_MODELS])
def test_16_bit_tokens_of_wide_models_in_batches_of_any_size(name, num_rows):
    for some, got in wide_outputs(name, num_rows):
        assert below_the_maximum(name, some, got) < TOLERANCE_16_BIT


@pytest.mark.parametrize("num_rows", [3, 20, 40, 60, 100])
@pytest.mark.parametrize("name", tiny_moe.WIDE_MODELS)
def test_16_bit_tokens_of_wide_models_with_experts_are_as_near_as_transformers_own(name, num_rows):
    for some, got in wide_outputs(name, num_rows):
        ours, theirs = share_far_below(name, some, got)
        assert ours <= 1.5 * theirs + 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_equal_eager_steps_for_every_kind_of_sampling(dtype):
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=2, top_p=0.8, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, top_k=20, min_p=0.01, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2, presence_penalty=0.3, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.0, frequency_penalty=0.7, logit_bias={5: 3.0}, min_tokens=24, max_tokens=24),
        SamplingParams(temperature=1.0, seed=5, logprobs=5, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=6, allowed_token_ids=[7, 8, 9, 10], max_tokens=24, ignore_eos=True),
    ]
    some = prompts()[: len(params)]
    kw = {"device": "cuda", "dtype": dtype}
    # without chunks or company that differ, bf16 sums in the same order
    eager = InlineEngine(tiny_model("gpu-llama"), graphs=False, **kw).generate(some, params)
    graphs = InlineEngine(tiny_model("gpu-llama"), graphs=True, **kw).generate(some, params)
    assert graphs == eager


@pytest.mark.parametrize("cached", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["gpu-llama", "gpu-qwen2-mixed", "gpu-qwen3"])
def test_caches_of_8_bits_by_graphs_and_as_on_the_cpu(name, cached):
    """Keys that are rounded to another side, for a sum's last bit, may change a token: of fp32 prompts few."""
    model_options = {"kv_cache_dtype": cached, "kv_cache_dtype_skip_layers": ["sliding_window"]}
    for dtype in (torch.float32, torch.bfloat16):
        kw = {"device": "cuda", "dtype": dtype, "model_options": model_options}
        eager = InlineEngine(tiny_model(name), graphs=False, **kw).generate(prompts(), GREEDY)
        assert InlineEngine(tiny_model(name), graphs=True, **kw).generate(prompts(), GREEDY) == eager
        if dtype == torch.float32:
            cpu = InlineEngine(tiny_model(name), model_options=model_options).generate(prompts(), GREEDY)
            assert sum(ours[:8] == theirs[:8] for ours, theirs in zip(eager, cpu, strict=True)) >= 12


def test_fp32_rows_do_not_depend_on_their_company():
    params = [SamplingParams(temperature=1.0, seed=n, top_p=0.95, max_tokens=32, ignore_eos=True) for n in range(16)]
    engine = InlineEngine(tiny_model("gpu-llama"), device="cuda", graphs=True)
    together = engine.generate(prompts(), params)
    assert together == [engine.generate([p], [q])[0] for p, q in zip(prompts(), params, strict=True)]


def test_the_cpu_and_the_gpu_draw_the_same_noise():
    params = [SamplingParams(temperature=1.0, seed=n, max_tokens=16, ignore_eos=True) for n in range(16)]
    cpu = InlineEngine(tiny_model("gpu-llama")).generate(prompts(), params)
    gpu = InlineEngine(tiny_model("gpu-llama"), device="cuda", graphs=True).generate(prompts(), params)
    assert gpu == cpu


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # once a process
@pytest.mark.parametrize("name", ["gpu-llama", "gpu-qwen2-moe", "gpu-deepseek-v3"])
def test_decode_never_waits_for_the_device(name):
    engine = InlineEngine(tiny_model(name), device="cuda", dtype=torch.bfloat16, graphs=True)
    step = engine.runner.step
    checked = []

    def watched(words, read_masks):
        is_decode = words[HEADER.at["num_prefill_rows"]] == 0
        torch.cuda.set_sync_debug_mode("error" if is_decode else "default")
        try:
            return step(words, read_masks)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            checked.append(is_decode)

    engine.runner.step = watched
    engine.generate(prompts(), SamplingParams(temperature=1.0, seed=1, max_tokens=32, ignore_eos=True))
    assert sum(checked) > 25


@pytest.mark.parametrize("name", ["gpu-llama", "gpu-qwen3-moe", "gpu-gpt-oss", "gpu-deepseek-v3"])
def test_nothing_is_compiled_while_serving(name, monkeypatch):
    from triton import knobs

    # 16 rows: decode steps are dependent launches, and mixed steps of more tokens are not
    engine = InlineEngine(tiny_model(name), device="cuda", dtype=torch.bfloat16, graphs=True, max_num_seqs=16)
    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **seen: compiled.append(seen["fn"].name))
    params = [
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2, presence_penalty=0.5, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, top_p=0.9, repetition_penalty=1.1, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.0, frequency_penalty=0.5, logprobs=3, max_tokens=5, ignore_eos=True),
    ]
    for n in (1, 4, 9, 16):  # decode steps and mixed steps of many sizes
        for some in ([p] * n for p in params):
            engine.generate(prompts()[:n], some)
        engine.generate(prompts()[:n], [params[i % len(params)] for i in range(n)])
    assert compiled == []


@pytest.mark.parametrize("delayed", [False, True])
def test_masks_on_the_device(delayed):
    from workers.test_runner import with_masks

    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    want = InlineEngine(tiny_model("gpu-llama"), device="cuda", graphs=True).generate(prompts(), params)
    engine = InlineEngine(tiny_model("gpu-llama"), device="cuda", graphs=True)
    came = with_masks(engine, delayed=delayed)
    assert engine.generate(prompts(), params) == want and len(came) >= 12
    engine = InlineEngine(tiny_model("gpu-llama"), device="cuda", graphs=True)
    with_masks(engine, allowed=[17, 400], delayed=delayed)
    assert {t for out in engine.generate(prompts(), params) for t in out} <= {17, 400}


def without_waiting(call):
    """The same, which fails if it waits for the device."""

    def watched(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


def test_a_row_without_its_mask_has_no_token_on_the_device():
    from workers.test_runner import with_masks

    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    want = InlineEngine(tiny_model("gpu-llama"), device="cuda", graphs=True).generate(prompts()[:4], params)
    for graphs in (False, True):
        engine = InlineEngine(tiny_model("gpu-llama"), device="cuda", graphs=graphs)
        with_masks(engine, rows=lambda plan: [1, 2] if len(plan.decode_rows) else [], missing=(2,))
        device = engine.runner.device
        device.sample_without_masks = without_waiting(device.sample_without_masks)
        outs = engine.generate(prompts()[:4], params)
        assert [out[0] for out in outs] == [out[0] for out in want]
        rows = [i for i, out in enumerate(outs) if out[1] == NO_TOKEN]
        assert len(rows) == 1 and all(outs[i] == want[i] for i in range(4) if i not in rows)


def test_masks_are_loaded_without_waiting_for_the_device():
    from workers.test_runner import with_masks

    engine = InlineEngine(tiny_model("gpu-llama"), device="cuda", graphs=True)
    with_masks(engine, allowed=[17, 400])
    load, loaded = without_waiting(engine.runner.device.masks.load), []
    engine.runner.device.masks.load = lambda *args: loaded.append(1) or load(*args)
    outs = engine.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert loaded and {t for out in outs for t in out} <= {17, 400}


def test_sampling_graphs_with_masks_are_captured_before_they_are_met():
    from workers.test_runner import with_masks

    engine = InlineEngine(tiny_model("gpu-llama"), device="cuda", graphs=True)
    graphs = engine.runner.graphs
    before = set(graphs._sampling)
    assert not any(kind & SAMPLING_MASK for _, kind in before)
    engine.runner.expect_masks()
    with engine.runner.device.stream():
        for _ in range(200):
            at = len(graphs._sampling)
            engine.runner.capture_masked_sampling_graph()
            assert len(graphs._sampling) <= at + 1  # one between two steps
    captured = set(graphs._sampling)
    assert captured - before and all(kind & SAMPLING_MASK for _, kind in captured - before) and not graphs._masked
    with_masks(engine, allowed=[17, 400])
    for temperature in (0.0, 0.8):
        outs = engine.generate(prompts(), SamplingParams(temperature=temperature, seed=1, max_tokens=8, ignore_eos=True))
        assert {t for out in outs for t in out} <= {17, 400}
    assert {key for key in graphs._sampling if key[1] & SAMPLING_MASK} == captured - before
