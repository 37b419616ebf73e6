"""A random model of 262,144 tokens of context, for programs whose prompts are longer than the bundled model's context.

It has the bundled model's tokenizer and chat template. One small layer with a sliding window makes a prompt of 40,000 tokens a
matter of seconds on a CPU. The rows of the LM head for tokens that end an answer are larger than the others, so that greedy
answers end after some tokens instead of running on until max_tokens, which the programs take for an error.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

BUNDLED = Path(__file__).parents[3] / "enginecore" / "loading" / "bundled"
CONTEXT = 262_144
HIDDEN, HEAD_DIM, MLP = 32, 32, 32
END_SCALE = 2.3  # about one token in eight ends an answer
GAIN = 4.0  # of the layer, so that a next token depends on all that its window holds, and an answer does not go round
SEED = 2  # with which answers to all kinds of prompts have some tokens, and an end


def make_random_model(folder: Path) -> Path:
    """folder: must not be there yet."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    bundled = json.loads((BUNDLED / "config.json").read_text())
    random = np.random.default_rng(SEED)
    vocab_size = bundled["vocab_size"]
    config = {
        **bundled,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": HIDDEN,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {f"self_attn.{name}_proj": (HEAD_DIM, HIDDEN) for name in "qkv"} | {"self_attn.o_proj": (HIDDEN, HEAD_DIM)}
    sizes |= {"mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN), "mlp.down_proj": (HIDDEN, MLP)}
    weights = {f"model.layers.0.{name}.weight": GAIN * random.normal(0, HIDDEN**-0.5, size) for name, size in sizes.items()}
    weights |= {f"model.layers.0.{name}_layernorm.weight": np.ones(HIDDEN) for name in ("input", "post_attention")}
    weights["model.norm.weight"] = np.ones(HIDDEN)
    weights["model.embed_tokens.weight"] = random.normal(0, 1, (vocab_size, HIDDEN))
    head = random.normal(0, 1, (vocab_size, HIDDEN))
    head[bundled["eos_token_id"]] *= END_SCALE
    weights["lm_head.weight"] = head
    save_file({name: weight.astype(np.float32) for name, weight in weights.items()}, folder / "model.safetensors")
    return folder
