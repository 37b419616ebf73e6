"""On a GPU: quantized checkpoints give the tokens of their dequantized weights, graphs those of eager steps; nothing is
dequantized that a kernel takes, nothing waits for the device or is compiled while serving.

Tokens are judged by transformers' float32 logits, inputs rounded by formula: a chosen one lies at the maximum or, in 16 bits,
near it.
"""

import functools
import gc
import json

import pytest
import torch
from inline_engine import InlineEngine
from quantized_models import FORMATS, GPU_FORMATS, WHILE_LOADING, quantized
from safetensors.torch import save_file
from tiny_models import tiny_model

from quire.ipc.sampling import SamplingParams
from quire.ipc.step.sections import HEADER
from quire.workers.loading.weights import load_weights, weight_loaders
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

pytestmark = pytest.mark.gpu

NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
NEAR = 0.05  # of the row's logit range: how far below the maximum a 16-bit engine's token may lie
ROUNDING = 1e-4  # of logits of about 4, in float32
# where inputs are rounded to fp8, too: tensor cores keep some 14 bits of sums, so some inputs come to lie on another side than
# transformers', a sixteenth apart (seen: 0.084 with 1024 inputs in bfloat16)
FP8_NEAR = 0.15
NEOX_NEAR = 0.25  # the same of int8 inputs behind LayerNorms; in float16 (a CPU: 0.13 dequantized; bfloat16 alone 0.32)
# which no kernel takes, or not all of it
PLAIN = ("gptq-v2-8bit", "pack-quantized", "pack-quantized-order", "fp8-block", "w8a8-static", "nf4", "mixed")
ALL = FORMATS | GPU_FORMATS | WHILE_LOADING
EVERY = list(ALL)


@functools.cache
def prompts():
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 3, 16, 40, 97]
    return [torch.randint(4, 500, (n,), generator=generator).tolist() for n in lengths]


def below_the_maximum(model, some, got, *, share):
    """How far a chosen token's logit lies below the maximum, of the row's range if share, at most."""
    worst = 0.0
    for prompt, output in zip(some, got, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        below = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        if share:
            below = below / (logits.max(-1).values - logits.min(-1).values)
        worst = max(worst, float(below.max()))
    return worst


def near(form):
    return FP8_NEAR if form == "mixed" or ("fp8" in form and form != "fp8-weight-only") else NEAR


def kinds(engine):
    return {type(module).__name__ for name, module in engine.model.named_modules() if name.endswith("proj.format")}


@pytest.mark.parametrize(("family", "form"), [(("wide-llama", "wide-qwen3")[i % 2], form) for i, form in enumerate(EVERY)])
def test_16_bit_tokens_are_those_of_the_dequantized_weights(family, form, tmp_path):
    model = quantized(family, form, tmp_path / "model")
    how = {"device": "cuda", "dtype": torch.bfloat16, "max_num_seqs": 8, "num_blocks": 64}
    how["model_options"] = {"quantization": form if form in WHILE_LOADING else None}
    eager, graphs = (InlineEngine(tmp_path / "model", graphs=graphs, **how) for graphs in (False, True))
    assert ("Dense" in kinds(eager)) == (form in PLAIN)
    for engine in (eager, graphs):
        assert below_the_maximum(model, prompts(), engine.generate(prompts(), GREEDY), share=True) < near(form)
    alone = graphs.generate(prompts()[2:3], GREEDY)
    assert below_the_maximum(model, prompts()[2:3], alone, share=True) < near(form)
    unpadded = torch.arange(4, 68).view(8, 8).tolist()  # the same numbers of rows: the same sums
    assert graphs.generate(unpadded, GREEDY) == eager.generate(unpadded, GREEDY)


@pytest.mark.parametrize(
    ("family", "form", "near"),
    [("gpu-gpt-neox", "gptq", NEAR), ("gpu-gpt-neox", "w8a8", NEOX_NEAR), ("gpu-phi3", "awq", NEAR)]
    + [("gpu-falcon-40b", "awq", NEAR), ("gpu-gemma2", "w8a8", NEAR), ("gpu-olmo2", "gptq", NEAR)]
    + [("gpu-cohere", "fp8-row", FP8_NEAR)],
)
def test_families_with_other_blocks(family, form, near, tmp_path):
    """Fused rows, LayerNorm, norms behind a product, blocks of parallel modules."""
    model = quantized(family, form, tmp_path / "model")
    dtype = torch.float16 if family == "gpu-gpt-neox" else torch.bfloat16
    for graphs in (False, True):
        how = {"device": "cuda", "dtype": dtype, "max_num_seqs": 8, "num_blocks": 64, "graphs": graphs}
        engine = InlineEngine(tmp_path / "model", **how)
        assert "Dense" not in kinds(engine)
        assert below_the_maximum(model, prompts(), engine.generate(prompts(), GREEDY), share=True) < near


@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("family", ["gpu-qwen2-moe", "gpu-deepseek-v3"])
def test_linear_layers_beside_experts(family, form):
    how = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "max_num_seqs": 8,
        "num_blocks": 64,
        "model_options": {"quantization": form},
    }
    eager, graphs = (InlineEngine(tiny_model(family), graphs=graphs, **how) for graphs in (False, True))
    assert "Dense" not in kinds(eager)
    unpadded = torch.arange(4, 68).view(8, 8).tolist()
    assert graphs.generate(unpadded, GREEDY) == eager.generate(unpadded, GREEDY)


@pytest.mark.parametrize("num_rows", [20, 100])
@pytest.mark.parametrize("form", ["awq", "w8a8", "fp8-row", "fp8-block-128", "gptq-8bit"])
def test_batches_of_any_size(form, num_rows, tmp_path):
    model = quantized("wide-llama", form, tmp_path / "model")
    generator = torch.Generator().manual_seed(num_rows)
    some = [torch.randint(4, 500, (1 + 13 * n % 50,), generator=generator).tolist() for n in range(num_rows)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    how = {"device": "cuda", "dtype": torch.bfloat16, "max_num_seqs": 128, "num_blocks": 512, "budget": 1024}
    got = InlineEngine(tmp_path / "model", graphs=True, **how).generate(some, params)
    assert below_the_maximum(model, some[:20], got[:20], share=True) < near(form)


@pytest.mark.parametrize("form", ["gptq", "awq", "gptq-8bit", "w8a8", "fp8-row"])
@pytest.mark.parametrize("family", ["gpu-llama", "gpu-qwen2-mixed"])
def test_fp32_tokens_are_transformers(family, form, tmp_path):
    model = quantized(family, form, tmp_path / "model")
    got = InlineEngine(tmp_path / "model", device="cuda", graphs=True).generate(prompts(), GREEDY)
    if ALL[form][2] is None:
        assert below_the_maximum(model, prompts(), got, share=False) <= ROUNDING
    else:
        assert below_the_maximum(model, prompts(), got, share=True) < near(form)


@pytest.mark.parametrize("form", ["awq", "gptq-8bit", "w8a8", "fp8-tensor", "fp8-block-128", "nf4"])
def test_nothing_waits_or_is_compiled_while_serving(form, tmp_path, monkeypatch):
    from triton import knobs

    quantized("wide-llama", form, tmp_path / "model")
    engine = InlineEngine(tmp_path / "model", device="cuda", dtype=torch.bfloat16, graphs=True)
    step, compiled = engine.runner.step, []

    def watched(words, read_masks):
        is_decode = words[HEADER.at["num_prefill_rows"]] == 0
        torch.cuda.set_sync_debug_mode("error" if is_decode else "default")
        try:
            return step(words, read_masks)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.step = watched
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **seen: compiled.append(seen["fn"].name))
    for n in (1, 3, 5):
        engine.generate(prompts()[:n], GREEDY)
    assert compiled == []


CONFIGS = {
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.mark.parametrize("form", CONFIGS)
def test_dummy_weights_take_no_more_than_they_do_in_the_end(form, tmp_path):
    fields = json.loads((tiny_model("wide-llama") / "config.json").read_text())
    fields |= {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 8}
    fields |= {"quantization_config": CONFIGS[form], "head_dim": 128, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = InlineEngine(tmp_path, device="cuda", dtype=torch.bfloat16, dummy=True, num_blocks=16)
    bytes_a_weight = {"int4": 0.55, "fp8": 1.05}[form]
    assert engine.model.weights_bytes < 8 * 218.2e6 * bytes_a_weight + 20e6
    assert torch.cuda.max_memory_allocated() - before < engine.model.weights_bytes + 1.0e9
    assert all(0 <= token < 512 for token in engine.generate([[1, 2, 3]], GREEDY)[0])


def drawn(target):
    """Values for a tensor of a checkpoint."""
    if target.dtypes == ("I32",):
        return torch.randint(-(2**31), 2**31 - 1, target.shape, dtype=torch.int32, device="cuda").cpu()
    return (torch.randn(target.shape, device="cuda") / 100).to(torch.bfloat16).cpu()


def test_a_file_takes_little_more_to_load_than_its_weights_do_in_the_end(tmp_path):
    """4-bit layers of an 8B, and a head: unpacked whole it alone would take half a gigabyte, and its temporaries two."""
    fields = json.loads((tiny_model("wide-llama") / "config.json").read_text())
    fields |= {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 2}
    fields |= {"quantization_config": CONFIGS["int4"] | {"lm_head": True}, "head_dim": 128, "vocab_size": 128256}
    fields |= {"num_key_value_heads": 8, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    def build():
        return build_model(read_model_config(tmp_path), torch.bfloat16, Parallel(device=torch.device("cuda")))

    targets = weight_loaders(build())
    tensors = {name: drawn(target) for name, target in targets.items() if not target.is_optional}
    save_file(tensors, tmp_path / "model.safetensors")
    del targets, tensors
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build()
    load_weights(model, tmp_path, "cuda", progress=False)
    torch.cuda.synchronize()
    final = torch.cuda.memory_allocated() - before
    assert final < 128256 * 4096 * 2.6 + 2 * 218.2e6 * 0.55 + 50e6
    assert torch.cuda.max_memory_allocated() - before < final + 1.0e9
