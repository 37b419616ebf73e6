"""Target: config.json of models without a family of Quire's own, which transformers' code runs (workers/models/transformers/).

They are read, or refused with a reason; neither takes long or much memory. The import of transformers takes seconds.
"""

import json
import logging
from collections.abc import Sequence

from fuzz.case import Case, Draw, Target, must
from fuzz.mutate import json_bytes, mutated_json

from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import parse_model_config

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SAME = {"vocab_size": 100, "max_position_embeddings": 64, "torch_dtype": "float32"}
CONFIGS = [
    {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", **_SIZES, **_SAME},
    {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", **_SIZES, **_SAME, "sliding_window": 8},
    {"architectures": ["OPTForCausalLM"], "model_type": "opt", **_SIZES, **_SAME, "ffn_dim": 48, "word_embed_proj_dim": 32},
    {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": 64,
        **_SAME,
    },
    {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys", **_SIZES, **_SAME, "auto_map": {"AutoModel": "x.Y"}},
]


def seeds() -> Sequence[Case]:
    return [Case({}, json.dumps(config).encode()) for config in CONFIGS]


def mutate(draw: Draw, case: Case, others: Sequence[Case]) -> Case:
    value = json.loads(case.payload)
    return Case({}, json_bytes(draw, mutated_json(draw, value, [*CONFIGS, json.loads(draw.choice(others).payload)])))


def check(case: Case) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        fields = json.loads(case.payload)
    except (ValueError, RecursionError):
        return
    if not isinstance(fields, dict):
        return
    try:
        parse_model_config(fields)
    except ModelConfigError as error:
        must(str(error).strip(), "an error without a text")


TARGET = Target("other_models", seeds, mutate, check, most_s=15.0)
