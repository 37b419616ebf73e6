"""The worked examples of docs/memory.md, computed by the functions behind `quire estimate`."""

from typing import Any, NamedTuple

from markdown import code, table

from quire.frontend.cli.estimate import Estimate, estimate, gpu_bytes
from quire.frontend.cli.estimate_model import Model, computed_parameters, sizes_of
from quire.ipc.config import EngineConfig
from quire.ipc.memory_plan import GIB, kv_groups

Json = dict[str, Any]

# The fields of these models' config.json that memory depends on.
MODELS: dict[str, Json] = {
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
    "Qwen/Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36, "vocab_size": 151936,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip


class Case(NamedTuple):
    model: str
    gpu: str  # "" for a CPU
    flags: dict[str, Any]

    @property
    def command(self) -> str:
        machine = f"--gpu {self.gpu}" if self.gpu else "--device cpu"
        words = [f"--{name.replace('_', '-')} {value}" for name, value in self.flags.items()]
        return " ".join(["quire estimate", self.model, machine, *words])


CASES = (
    Case("meta-llama/Llama-3.1-8B-Instruct", "H100", {"max_model_len": 8192}),
    Case("meta-llama/Llama-3.1-8B-Instruct", "L40S", {"max_model_len": 8192}),
    Case("Qwen/Qwen3-8B", "L4", {"max_model_len": 8192, "max_num_seqs": 64}),
    Case("Qwen/Qwen3-0.6B", "L4", {"max_model_len": 8192}),
    Case("Qwen/Qwen3-0.6B", "", {"max_model_len": 4096, "cpu_kv_cache_gib": 4.0}),
)


def model_of(name: str) -> Model:
    config = MODELS[name]
    sizes, tied = sizes_of(config), bool(config.get("tie_word_embeddings"))
    return Model(name, sizes, config["max_position_embeddings"], "bfloat16", computed_parameters(sizes, tied), tied, False)


def estimate_of(case: Case) -> Estimate:
    memory = gpu_bytes(case.gpu, None) if case.gpu else 0
    return estimate(model_of(case.model), EngineConfig(**case.flags), memory, case.gpu)


def examples() -> str:
    parts = []
    for case in CASES:
        found, model = estimate_of(case), model_of(case.model)
        name = case.model.partition("/")[2]
        parts += [f"### {name} on {'one ' + case.gpu if case.gpu else 'a CPU'}", code(case.command)]
        parts.append(table(["", "how", "GiB"], [*_rows(case, found, model)]))
        parts.append(
            f"{found.tokens:,} tokens of KV cache / {found.max_model_len:,} = **{found.requests:.1f} requests** of the longest "
            "kind at once."
        )
    return "\n\n".join(parts)


def _rows(case: Case, found: Estimate, model: Model) -> list[list[str]]:
    item = 4 if found.dtype == "float32" else 2
    layers, layer = len(model.sizes.layers), model.sizes.layers[0]
    weights = f"{model.num_parameters:,} parameters × {item} bytes"
    rows = [
        ["weights", weights + ("" if case.gpu else ", and packed copies"), _gib(found.weights_bytes)],
        [
            "a step",
            f"activations of {max(found.max_num_batched_tokens, found.max_num_seqs):,} tokens",
            _gib(found.activation_bytes),
        ],
    ]
    if case.gpu:
        rows += [
            ["graphs", "0.5 GiB, logits, and a captured step", _gib(found.graphs_bytes)],
            ["tables", f"CUDA's context, and state of {found.max_num_seqs:,} sequences", _gib(found.tables_bytes)],
        ]
    per_token = (
        f"2 × {layers} layers × {layer.num_kv_heads} heads × {layer.head_dim} × {item} bytes = {found.kv_bytes_per_token:,}"
    )
    assert len(kv_groups(model.sizes)) == 1
    room = f"{found.total_bytes / GIB:.2f} × 0.9, less the above" if case.gpu else "--cpu-kv-cache-gib"
    return [
        *rows,
        ["KV cache", room, _gib(found.kv_cache_bytes)],
        ["a token of it", per_token + " bytes", ""],
        ["blocks", f"of {found.block_size} tokens, the null block included: {found.num_blocks:,}", ""],
    ]


def _gib(number: int) -> str:
    return f"{number / GIB:.2f}"
