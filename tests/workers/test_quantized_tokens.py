"""Quantized weights on the CPU in float32: transformers' tokens with the dequantized weights, inputs rounded where they are.

Integers of weights whose inputs are not rounded are multiplied in bfloat16, with scales in bfloat16: their logits are off by
up to ROUGH, where others' are by ROUNDING. What is read wrongly is looked for in dequantized weights.
"""

import json

import pytest
import torch
from inline_engine import InlineEngine
from quantized_models import FORMATS, LAST_BITS, WHILE_LOADING, WITH_HEAD, inputs_recorded, quantized
from safetensors.torch import load_file, save_file

from quire.ipc.sampling import SamplingParams
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

NEW_TOKENS = 32
ROUNDING = 1e-5  # of logits of about 4
ROUGH = 0.25  # of logits of about 4; 0.13 was seen
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
FAMILIES = ("llama-mqa-bias", "mistral-sliding", "qwen2-mixed", "qwen3-tied")  # a quantized head is not tied
ALL = FORMATS | WHILE_LOADING
EXACT = ("w8a8", "fp8-tensor", "fp8-block", "nf4", "w8a8-static", "mxfp4", "fp8", "fp8_per_channel", "fp8_per_block", "int8")
# one family of each format in every run, the others where there is time
PAIRS = [
    pytest.param(family, form, marks=() if i % len(FAMILIES) == j else pytest.mark.slow)
    for i, form in enumerate(ALL)
    for j, family in enumerate(FAMILIES)
    if not (form in WITH_HEAD and family == "qwen3-tied")
]


def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 500, (n,), generator=generator).tolist() for n in (1, 7, 40)]


def engine_of(folder, form):
    return InlineEngine(folder, model_options={"quantization": form} if form in WHILE_LOADING else {})


def assert_tokens(model, prompt, output, tolerance=ROUNDING):
    """Each token is one that transformers' model finds likeliest after those before it, but for `tolerance`."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert len(output) == NEW_TOKENS and (chosen >= logits.max(-1).values - tolerance).all(), len(prompt)


@pytest.mark.parametrize(("family", "form"), PAIRS)
def test_tokens_are_those_of_the_dequantized_weights(family, form, tmp_path):
    model = quantized(family, form, tmp_path / "model")
    engine = engine_of(tmp_path / "model", form)
    model.last_bits = LAST_BITS if form in EXACT else ROUGH
    tolerance = ROUNDING if form in EXACT else ROUGH
    if ALL[form][2] is None:
        outputs = engine.generate(prompts(), GREEDY)
        for prompt, output in zip(prompts(), outputs, strict=True):
            assert_tokens(model, prompt, output, tolerance)
    else:
        outputs = []
        for prompt in prompts():
            with inputs_recorded(engine.model) as model.inputs:
                outputs += engine.generate([prompt], GREEDY)
            assert_tokens(model, prompt, outputs[-1], tolerance)
    assert len({token for output in outputs for token in output}) >= 16, outputs


def swapped(octets):
    """The two nibbles of each byte."""
    flat = octets.contiguous().view(torch.uint8)
    return (flat >> 4 | flat << 4).view(octets.dtype)


def off_by_one(words):
    """Each zero point of four bits is one less; none of these is 0."""
    return words - 0x11111111


# (format, what of each layer is read wrongly, how): a file that is wrong for a right reader is right for a wrong one
WRONG = [
    ("gptq", "qweight", swapped),
    ("gptq", "qzeros", off_by_one),
    ("gptq", "g_idx", lambda g_idx: g_idx.roll(1)),
    ("gptq", "scales", lambda scales: scales.roll(1, 0)),
    ("gptq-v2-8bit", "qzeros", lambda words: words - 0x01010101),
    ("awq", "qweight", swapped),
    ("awq", "qzeros", swapped),
    ("auto-round", "qzeros", off_by_one),
    ("pack-quantized", "weight_packed", swapped),
    ("pack-quantized", "weight_zero_point", off_by_one),
    ("pack-quantized", "weight_scale", lambda scales: scales.roll(1, 1)),
    ("fp8-block", "weight_scale_inv", lambda scales: 1 / scales),
    ("fp8-block", "weight_scale_inv", lambda scales: scales.roll(1, 1)),
    ("nf4", "weight", swapped),
    ("mxfp4", "weight_blocks", swapped),
    ("mxfp4", "weight_scales", lambda scales: scales.roll(1, 1)),
    ("bnb-int8", "SCB", lambda scb: scb.roll(1)),
]


@pytest.mark.parametrize(("form", "name", "change"), WRONG)
def test_what_is_read_wrongly_shows(form, name, change, tmp_path, dequantized):
    model = quantized("llama", form, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    last = tensors["model.layers.2.mlp.down_proj." + name]  # of the whole model one layer is enough
    tensors["model.layers.2.mlp.down_proj." + name] = change(last).contiguous()
    save_file(tensors, file)
    prompt = prompts()[1]
    engine = InlineEngine(tmp_path / "model")
    with inputs_recorded(engine.model) as model.inputs:
        [output] = engine.generate([prompt], GREEDY)
    with pytest.raises(AssertionError):
        assert_tokens(model, prompt, output)


@pytest.mark.parametrize("change", [None, {"symmetric": False}, {"strategy": "group", "group_size": 32}, {"type": "float"}])
def test_inputs_that_are_rounded_otherwise_show(change, tmp_path):
    """w8a8's: not at all, not symmetric, in groups, to floats."""
    model = quantized("llama", "w8a8", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = change and {**group["input_activations"], **change}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    engine = InlineEngine(tmp_path / "model")
    with inputs_recorded(engine.model) as model.inputs:
        [output] = engine.generate(prompts()[1:2], GREEDY)
    with pytest.raises(AssertionError):
        assert_tokens(model, prompts()[1], output)


@pytest.mark.parametrize("form", FORMATS)
def test_ranks_hold_their_parts_of_the_dequantized_weights(form, tmp_path):
    model = quantized("llama", form, tmp_path / "model")
    config = read_model_config(tmp_path / "model")
    for rank in range(2):
        ours = build_model(config, torch.float16, Parallel(rank, 2))  # float16 is not packed
        load_weights(ours, tmp_path / "model", "cpu")
        block, theirs = ours.model.layers[1], model.model.layers[1]
        down, k = theirs.mlp.down_proj.weight, theirs.self_attn.k_proj.weight
        assert torch.equal(block.mlp.down_proj.format.weight, down.chunk(2, 1)[rank].half())
        assert torch.equal(block.self_attn.qkv_proj.format.weight[32:48], k.chunk(2)[rank].half())
