"""Rotary factors of long and of short sequences, chosen by the length that is served: each equals transformers on its side."""

import pytest
import torch
from inline_engine import InlineEngine
from tiny_models import reference, tiny_model

from quire.ipc.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("impl", ["quire", "transformers"])
@pytest.mark.parametrize("name", ["phi3-longrope", "phi4-mini"])
@pytest.mark.parametrize(("length", "max_model_len"), [(480, 512), (513, 600)])
def test_either_side_of_the_original_length(name, length, max_model_len, impl):
    prompt = torch.randint(4, 500, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    model_options = {"model_impl": impl}
    [output] = InlineEngine(tiny_model(name), max_model_len=max_model_len, model_options=model_options).generate(
        [prompt], GREEDY
    )
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        want = reference(name).generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert output == want[0, length:].tolist() and len(set(output)) > 8


def test_the_wrong_side_would_be_seen():
    prompt = torch.randint(4, 500, (480,), generator=torch.Generator().manual_seed(3)).tolist()
    short, long = (InlineEngine(tiny_model("phi3-longrope"), max_model_len=n).generate([prompt], GREEDY) for n in (512, 600))
    assert short != long
