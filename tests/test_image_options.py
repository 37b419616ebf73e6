"""Images beside other options: drafts of several kinds, and a KV cache of 8 bits. Tokens are transformers'."""

import sys
from unittest import mock

import pytest
import tiny_wrappers
import torch
from drafters import DrafterOfTexts, drafting
from media_engine import PLACEHOLDER, MediaEngine, floats_of, image_of, prompt, reference
from test_speculation import config
from workers.test_kv_cache_dtype import recorded

from quire.ipc.sampling import SamplingParams

TEXT = [5, 81, 300, 17, 222, 4, 99, 410, 37, 51, 6, 7, 8, 144, 290, 333, 21]
PROMPTS = [
    [TEXT[:5], image_of(3, 2), image_of(1, 1), image_of(2, 5), TEXT[5:]],
    [image_of(2, 2, 3), TEXT * 3],
    [TEXT],
    [TEXT * 2, image_of(4, 3)],
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("budget", [19, 512])
@pytest.mark.parametrize("drafter", ["ngram", "right", "some", "wrong"])
@pytest.mark.parametrize("name", ["qwen3-vl-seen", "qwen2.5-vl-seen", "qwen3.5-seen", "glm4.1v-seen"])
def test_drafts_change_nothing(name, drafter, budget):
    """Verified rows rotate by their slot's delta, as rows of one token do."""
    want = [reference(name, parts, 24) for parts in PROMPTS]
    engine = MediaEngine(tiny_wrappers.wrapped(name), speculation=config(8), budget=budget, num_states=80)
    if drafter != "ngram":
        texts = [prompt(*parts)[0] + tokens for parts, tokens in zip(PROMPTS, want, strict=True)]
        vocab_size = engine.runner.ctx.config.vocab_size
        engine.runner.device.drafter = DrafterOfTexts(engine.runner.ctx.cache, 0, drafting(drafter, texts, 7, vocab_size))
    for _ in range(2):  # the second time from the caches
        assert engine.generate([prompt(*parts) for parts in PROMPTS], GREEDY) == want
    accepted = sum(engine.scheduler.counters.windows.so_far().accepted_by_place)
    assert drafter not in ("right", "some") or accepted > 40


def rounded_logits(name, ids, image, ours):
    """Logits of transformers, of which the text's attention sees our keys and values rounded to 8 bits."""
    model = tiny_wrappers.reference(name)
    module = sys.modules[type(model.model.language_model.layers[0].self_attn).__module__]
    eager = module.eager_attention_forward

    def rounded(x, taken):
        taken = taken.transpose(0, 1)[None]
        torch.testing.assert_close(taken, x, rtol=1e-4, atol=1e-4)
        return taken.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()

    def attention(layer, q, k, v, *more, **options):
        if (index := getattr(layer, "layer_idx", None)) in ours:
            k, v = (rounded(x, taken) for x, taken in zip((k, v), ours[index], strict=True))
        return eager(layer, q, k, v, *more, **options)

    given = torch.tensor([ids])
    inputs = {
        "pixel_values": floats_of(image.tensors["pixel_values"]),
        "image_grid_thw": image.tensors["image_grid_thw"],
        "mm_token_type_ids": (given == PLACEHOLDER).int(),
    }
    with mock.patch.object(module, "eager_attention_forward", attention), torch.inference_mode():
        return model(given, **inputs).logits[0]


@pytest.mark.parametrize("budget", [7, 512])
@pytest.mark.parametrize("name", ["qwen3-vl-seen", "qwen2.5-vl-seen"])
def test_tokens_are_those_of_keys_and_values_rounded_to_eight_bits(name, budget):
    image = image_of(3, 4)
    ids, items = prompt(TEXT[:6], image, TEXT[6:])
    options = {"sees": True, "kv_cache_dtype": "fp8"}
    engine = MediaEngine(tiny_wrappers.wrapped(name), model_options=options, budget=budget)
    layers = [i for i, spec in enumerate(engine.runner.ctx.cache.specs) if spec.cache_dtype is not None]
    assert layers
    with recorded(layers) as ours:
        [output] = engine.generate([(ids, items)], GREEDY)
    logits = rounded_logits(name, [*ids, *output[:-1]], image, ours)[len(ids) - 1 :]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (chosen >= logits.max(-1).values - 1e-5).all() and len(set(output)) > 4
    assert engine.generate([(ids, items)], GREEDY) == [output] and engine.runs == 1  # from cached blocks
