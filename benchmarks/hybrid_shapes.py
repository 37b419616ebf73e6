"""Write model folders with the sizes of published models that have recurrent layers: `hybrid_shapes.py OUT [NAME ...]`.

A folder has config.json and a tokenizer of bytes padded to the vocabulary's size, and no weights: run it with
`--load-format dummy`. The sizes are those of the checkpoints' config.json; Qwen3.8-27B's are the 27B's of Qwen3.5 and 3.6.
vLLM reads the same folders from 0.28 on: before, it knew Qwen3.5's language model as a part of the one with images alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LINEAR, FULL = "linear_attention", "full_attention"


def _qwen3_5(layers: int, **fields: Any) -> dict[str, Any]:
    """Three layers of Gated DeltaNet to one of attention."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "num_hidden_layers": layers,
        "layer_types": [FULL if i % 4 == 3 else LINEAR for i in range(layers)],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **fields,
    }


def _nemotron_h(pattern: str, **fields: Any) -> dict[str, Any]:
    """M: Mamba 2, *: attention, -: MLP, E: experts."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "num_attention_heads": 32,
        "head_dim": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "expand": 2,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_ssm_cache_dtype": "float32",
        "time_step_limit": [0.0, float("inf")],
        "time_step_floor": 1e-4,
        "time_step_min": 1e-3,
        "time_step_max": 0.1,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **fields,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3.6-35B-A3B": _qwen3_5(
        40,
        architectures=["Qwen3_5MoeForCausalLM"],
        model_type="qwen3_5_moe_text",
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Qwen3.8-27B": _qwen3_5(
        64,
        hidden_size=5120,
        intermediate_size=17408,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_value_heads=48,
    ),
    "Qwen3.5-9B": _qwen3_5(
        32,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_value_heads=32,
    ),
    "Nemotron-3-Nano-30B-A3B": _nemotron_h(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        hidden_size=2688,
        intermediate_size=1856,
        num_key_value_heads=2,
        mamba_num_heads=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        n_shared_experts=1,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        n_group=1,
        topk_group=1,
    ),
    "Nemotron-H-8B": _nemotron_h(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        hidden_size=4096,
        intermediate_size=21504,
        num_key_value_heads=8,
        mamba_num_heads=128,
        max_position_embeddings=8192,
    ),
}


def tokenizer_text(vocab_size: int) -> str:
    """A tokenizer without merges: a token a byte, then names for all other ids."""
    vocab = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    for text in (*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"x{i}" for i in range(vocab_size))):
        if len(vocab) < vocab_size:
            vocab.setdefault(text, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer.to_str()


def write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(tokenizer_text(config["vocab_size"]))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)} (default: all)")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in SHAPES]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}")
    for name in args.names or SHAPES:
        write(args.out / name, SHAPES[name])
        print(args.out / name)


if __name__ == "__main__":
    main()
