"""On a GPU: models by transformers' own code give transformers' tokens, eagerly and from graphs, and bf16 stays near them."""

import pytest
import torch
from inline_engine import InlineEngine
from tiny_models import reference, tiny_model

from quire.ipc.sampling import SamplingParams

pytestmark = pytest.mark.gpu

NEW_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
MODEL_OPTIONS = {"model_impl": "transformers"}
ROUNDING = 1e-4  # of logits of about 4: what lies so near the maximum is equal


def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 500, (n,), generator=generator).tolist() for n in (1, 5, 17, 48, 97)]


def below(name, got):
    """How far a chosen token lies below the maximum of transformers' fp32 logits, at most, and that of the row's range."""
    worst = share = 0.0
    for prompt, out in zip(prompts(), got, strict=True):
        with torch.inference_mode():
            logits = reference(name)(torch.tensor([[*prompt, *out[:-1]]])).logits[0, len(prompt) - 1 :]
        missing = logits.max(-1).values - logits.gather(1, torch.tensor(out)[:, None])[:, 0]
        worst = max(worst, float(missing.max()))
        share = max(share, float((missing / (logits.max(-1).values - logits.min(-1).values)).max()))
    return worst, share


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["gpu-llama", "gpu-qwen3", "gpu-mistral-sliding"])
def test_fp32_equals_transformers(name, graphs):
    engine = InlineEngine(tiny_model(name), device="cuda", graphs=graphs, model_options=MODEL_OPTIONS)
    assert below(name, engine.generate(prompts(), GREEDY))[0] <= ROUNDING
    assert below(name, [engine.generate([p], GREEDY)[0] for p in prompts()])[0] <= ROUNDING


def test_bf16_stays_near():
    engine = InlineEngine(
        tiny_model("gpu-llama"), device="cuda", graphs=True, dtype=torch.bfloat16, model_options=MODEL_OPTIONS
    )
    assert below("gpu-llama", engine.generate(prompts(), GREEDY))[1] < 0.05
