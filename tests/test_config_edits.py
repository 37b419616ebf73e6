"""config.json of tiny models edited one field at a time, left out or with another activation, on the same weights: what is
served are the tokens of transformers' model, and what neither runs is refused.
"""

import json

import pytest
import tiny_families
import tiny_models
import torch
import transformers
from inline_engine import InlineEngine
from workers.test_family_defaults import FAMILIES, REQUIRED, SERVED, filled_by_transformers, left_out, parsed

from quire.ipc.sampling import SamplingParams
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.config import ModelConfigError
from quire.workers.models.fields import ACTIVATION_FIELDS
from quire.workers.models.spellings import ACTIVATIONS

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ROUNDING = 1e-4  # of logits
ALWAYS = {"smollm3", "gpt_neox"}
NO_ACTIVATION = "bloom"  # its class has one of its own
EACH = {family: family if family in ALWAYS else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES}
WITH_ACTIVATION = [EACH[family] for family in FAMILIES if family != NO_ACTIVATION]
# Served though transformers' model does not run: padding beyond a small vocabulary, and what Mistral 4 reads and does not need
ALSO_SERVED = SERVED | {
    "pad_token_id",
    "num_key_value_heads",
    "rope_parameters.llama_4_scaling_beta",
    "rope_parameters.rope_type",
}
# Refused though transformers' model runs: a quarter of Gemma 4's heads rotated in the way of others, and more experts of a
# token than there are in the groups to choose from
ALSO_REFUSED = REQUIRED | {"rope_parameters.full_attention.rope_type", "topk_group"}
TIED = "the checkpoint holds an lm_head.weight of its own that differs"  # transformers ties it all the same


def prompts():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(4, 500, (n,), generator=generator).tolist() for n in (40, 3)]


def edited(family, folder, fields):
    """The family's tiny model with other fields in config.json."""
    folder.mkdir()
    for file in tiny_models.tiny_model(FAMILIES[family]).iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def served(folder):
    """(outputs, ""), or (None, why it is refused)."""
    try:
        return InlineEngine(folder).generate(prompts(), GREEDY), ""
    except (ModelConfigError, WeightsError) as error:
        return None, str(error)


def loaded(family, folder):
    """transformers' model; None: it refuses the config, or lacks tensors, or has some left."""
    attention = "sdpa" if family == "falcon" else "eager"
    model_class = getattr(transformers, tiny_families.CLASSES[family][1])
    options = {"dtype": torch.float32, "attn_implementation": attention, "output_loading_info": True}
    try:
        model, info = model_class.from_pretrained(folder, **options)
        model.eval()(torch.tensor([prompts()[0]]))
    except Exception:  # whatever a model finds wrong with its config
        return None
    return None if any(info.values()) else model


def are_greedy(model, outputs):
    """Whether each token is the model's argmax after those before it."""
    for prompt, output in zip(prompts(), outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        if (chosen < logits.max(-1).values - ROUNDING).any():
            return False
    return True


def texts_of(family):
    """(config.json's fields of the text model, what makes a config.json of others)."""
    fields = json.loads((tiny_models.tiny_model(FAMILIES[family]) / "config.json").read_bytes())
    if "text_config" in fields:
        return fields["text_config"], lambda text: {**fields, "text_config": text}
    return fields, dict


@pytest.mark.parametrize("family", EACH.values())
def test_without_a_field_the_tokens_are_transformers(family, tmp_path):
    text, whole = texts_of(family)
    before, compared = (parsed(whole(text)), filled_by_transformers(family, whole(text))), 0
    for name, rest in left_out(text):
        fields = whole(rest)
        if (parsed(fields), filled_by_transformers(family, fields)) == before:
            continue
        folder = edited(family, tmp_path / name, fields)
        (outputs, why), model = served(folder), loaded(family, folder)
        if outputs is None:
            assert model is None or name in ALSO_REFUSED or TIED in why, (name, why)
        elif model is None:
            assert name in ALSO_SERVED, name
        else:
            assert are_greedy(model, outputs), name
        compared += 1
    assert compared > 4


@pytest.mark.parametrize("family", WITH_ACTIVATION)
def test_with_another_activation_the_tokens_are_transformers_or_it_is_refused(family, tmp_path):
    """Experts compute SiLU alone, and gpt-oss's activation is no matter of its config."""
    text, whole = texts_of(family)
    name = next(n for n in ACTIVATION_FIELDS if n in text)
    takes_any = "expert" not in " ".join(text) or text.get("enable_moe_block") is False
    for value in ("relu", "quick_gelu", "gelu", "gelu_fast", "tanh", "sigmoid", "gelu_python", "mish"):
        folder = edited(family, tmp_path / value, whole({**text, name: value}))
        outputs, why = served(folder)
        if takes_any and value in ACTIVATIONS:
            assert are_greedy(loaded(family, folder), outputs), value
        else:
            assert f'config.json sets {name} to "{value}"' in why and "\n" not in why
