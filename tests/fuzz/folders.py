"""Target: model folders: config.json, the tokenizer's files, generation_config.json, templates, safetensors, an index of
them.

A folder with one hostile file is read as at a server's start: by the core, a frontend, the process that tries grammars, a
worker up to its weights, and `quire estimate`. It loads, or an error of the reader's own says why. No code of a folder
runs, and none of it takes long or much memory.
"""

import functools
import json
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fake_client import HELLO, TEMPLATE, make_tokenizer
from fuzz.case import Case, Draw, Target, must
from fuzz.mutate import json_bytes, mutated_bytes, mutated_json, mutated_text
from harmony_template import TEMPLATE as HARMONY
from messages_cases import QWEN3
from safetensors.torch import save

from quire.enginecore.grammar.vocabulary import VocabularyError, make_vocabulary
from quire.enginecore.loading import tiktoken_file
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import frontend_files, model_summary, resolve_model, resolve_tokenizer
from quire.frontend.cli.estimate_model import BY_HAND, read_model
from quire.frontend.cli.estimate_sizes import EstimateError
from quire.frontend.text.chat_template import ChatTemplateError
from quire.frontend.text.request_templates import TemplateProcess, ToRender
from quire.frontend.text.tokenizer import Tokenizer
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

TESTS = Path(__file__).parents[1]
_MOST_BYTES = 4 << 30  # of this process
_MOST_PARAMETERS = 1 << 20  # of a model whose weights are loaded
_MOST_LAYERS = 64  # of one that is built
_TEMPLATE_S = 1.0
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
}
SETTINGS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "chat_template": TEMPLATE,
    "add_bos_token": True,
    "added_tokens_decoder": {
        "256": {"content": "<s>", "special": True},
        "258": {"content": "<x>", "lstrip": True, "normalized": False},
    },
    "extra_special_tokens": {"image_token": "<i>"},
    "model_max_length": 64,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]},
    "split_special_tokens": False,
}
GENERATION = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "eos_token_id": [257, 3],
    "do_sample": True,
    "max_new_tokens": 9,
    "num_beams": 2,
}
QUANTIZED = [
    {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True, "dynamic": {"-:.*mlp.*": {}}},
    {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 8,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    },
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8], "fmt": "e4m3"},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "group_size": 8, "strategy": "group", "symmetric": True},
            }
        },
    },
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"},
    {"quant_method": "auto-round", "bits": 4, "group_size": 8, "sym": True, "packing_format": "auto_round:auto_gptq"},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]},
]
ROPES = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"type": "linear", "factor": 2.0},
]
TIKTOKEN = b"".join(b"%s %d\n" % (token, rank) for rank, token in enumerate([b"YQ==", b"Yg==", b"YWI=", b"IA=="]))


@functools.cache
def configs() -> dict[str, dict[str, Any]]:
    """Configs of every family that the tests have one of, by name."""
    found = {
        path.parent.name: json.loads(path.read_bytes()) for path in sorted((TESTS / "workers/published").glob("*/config.json"))
    }
    found |= json.loads((TESTS / "workers/published_fields.json").read_bytes())
    found |= {f"quantized {i}": {**LLAMA, "quantization_config": config} for i, config in enumerate(QUANTIZED)}
    return {"llama": LLAMA, **found, **{f"rope {i}": {**LLAMA, "rope_scaling": rope} for i, rope in enumerate(ROPES)}}


_LAYER = {
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}


@functools.cache
def files() -> dict[str, bytes]:
    """The folder as it is right. Its weights are those of LLAMA."""
    shapes = {
        "model.embed_tokens": (260, 16),
        "model.norm": (16,),
        **{f"model.layers.0.{name}": of for name, of in _LAYER.items()},
    }
    return {
        "config.json": json.dumps(LLAMA).encode(),
        "tokenizer.json": make_tokenizer().backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(SETTINGS).encode(),
        "special_tokens_map.json": json.dumps({"pad_token": "<x>", "unk_token": {"content": "<u>"}}).encode(),
        "added_tokens.json": json.dumps({"<y>": 259}).encode(),
        "generation_config.json": json.dumps(GENERATION).encode(),
        "model.safetensors": save({f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}),
    }


def seeds() -> Sequence[Case]:
    found = [Case({"file": name}, data) for name, data in files().items()]
    found += [Case({"file": "config.json"}, json.dumps(config).encode()) for config in configs().values()]
    found += [Case({"file": "chat_template.jinja"}, text.encode()) for text in (TEMPLATE, QWEN3, HARMONY)]
    index = {"metadata": {"total_size": 1}, "weight_map": {"model.norm.weight": "model.safetensors"}}
    found.append(Case({"file": "model.safetensors.index.json"}, json.dumps(index).encode()))
    found.append(Case({"file": "quantize_config.json"}, json.dumps({"bits": 4, "group_size": 8, "desc_act": True}).encode()))
    found.append(Case({"file": "tiktoken.model"}, TIKTOKEN))
    found.append(Case({"file": "additional_chat_templates/tool_use.jinja"}, TEMPLATE.encode()))
    return found


def mutate(draw: Draw, case: Case, others: Sequence[Case]) -> Case:
    name, data = case.head["file"], case.payload
    if name.endswith(".jinja"):
        words = [
            "{{ ",
            " }}",
            "{% for x in range(9**9) %}",
            "{% endfor %}",
            "{% include 'x' %}",
            "''.__class__.__mro__",
            "|attr('x')",
            "namespace(_x=1)",
            "cycler",
            "lipsum.__globals__",
        ]
        return Case(case.head, mutated_text(draw, data.decode(errors="replace"), words).encode(errors="replace"))
    if name == "model.safetensors":
        return Case(case.head, _odd_tensors(draw, data))
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return Case(case.head, mutated_bytes(draw, data))
    parts = [json.loads(other.payload) for other in others if other.head["file"] == name and _is_json(other.payload)]
    return Case(case.head, json_bytes(draw, mutated_json(draw, value, parts))[: 200 << 10])


def _odd_tensors(draw: Draw, data: bytes) -> bytes:
    """A safetensors file with another header, or of damaged bytes."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        header = None
    if header is None or draw.random() < 0.2:
        return mutated_bytes(draw, data)
    odd = json_bytes(draw, mutated_json(draw, header, [header], ["dtype", "shape", "data_offsets", "__metadata__"]))
    told = len(odd) if draw.random() < 0.9 else draw.choice([0, 1, 2**63, 2**64 - 1, len(odd) + 1])
    return told.to_bytes(8, "little") + odd + data[8 + size :]


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


# --------------------------------------------------------------------------------------------------------------- a case
def check(case: Case) -> None:
    _limit_memory()
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as path:
        folder = Path(path)
        given = {**files(), case.head["file"]: case.payload}
        if case.head["file"] == "tiktoken.model":
            given["tokenizer_config.json"] = json.dumps({"tokenizer_class": "TikTokenTokenizer"}).encode()
        for name, data in given.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        _check_core(folder, case)
        _check_worker(folder, case.head["file"])


@functools.cache
def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))


def _check_core(folder: Path, case: Case) -> None:
    """What the core reads, and what frontends get of it."""
    if case.head["file"] == "tiktoken.model":
        try:
            tiktoken_file.tokenizer_of(folder).encode("a b ✓")
        except Exception as error:  # the process that converts says any of them
            must(str(error).strip(), "an error without a text")
        return
    try:
        resolve_model(str(folder))
        resolve_tokenizer(None, folder)
        summary = model_summary(folder)
        sent = frontend_files(folder)
    except ModelFilesError as error:
        names_file = case.head["file"].partition("/")[0] in str(error) or str(folder) in str(error)
        must(names_file or case.head["file"] == "config.json", "an error that names no file:", error)
        return
    try:
        tokenizer = Tokenizer.from_files(sent)
    except ValueError as error:
        must(".json" in str(error) or ".jinja" in str(error), "an error that names no file:", error)
        return
    for text in ("hi ✓<s>", ""):
        tokenizer.decode(tokenizer.encode(text))
    try:
        make_vocabulary(sent["tokenizer.json"], summary.vocab_size, summary.eos_token_ids)
    except VocabularyError as error:
        must(str(error).strip(), "an error without a text")
    if tokenizer.templates and ("jinja" in case.head["file"] or "tokenizer_config" in case.head["file"]):
        _render(tokenizer)


@functools.cache
def _process() -> TemplateProcess:
    return TemplateProcess()


def _render(tokenizer: Tokenizer) -> None:
    for with_tools in (False, True):
        tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}] if with_tools else None
        try:
            source, form = tokenizer.template(None, with_tools)
            wanted = ToRender(source, tokenizer.special_tokens, form, HELLO["messages"], tools, None, True, False, {})
            text = _process().render(wanted, _TEMPLATE_S).text
        except ChatTemplateError as error:
            must(str(error).strip(), "an error without a text")
        else:
            must("root:" not in text and "<module '" not in text, "a template got out of its sandbox:", text)


def _check_worker(folder: Path, name: str) -> None:
    """What a worker reads, up to the weights of a small model."""
    try:
        config = read_model_config(folder, model_impl="quire")
        if len(config.layers) <= _MOST_LAYERS:
            model = build_model(config, torch.float32, Parallel(device="meta"))
            if sum(parameter.numel() for parameter in model.parameters()) <= _MOST_PARAMETERS:
                load_weights(build_model(config, torch.float32, Parallel(device="cpu")), folder, "cpu", progress=False)
    except (ModelConfigError, WeightsError) as error:
        must(str(error).strip(), "an error without a text")
    architectures = _architectures(folder)
    if architectures and architectures[0] in BY_HAND:
        try:
            read_model(str(folder), None, None, None, {})
        except EstimateError as error:
            must(str(error).strip(), "an error without a text")


def _architectures(folder: Path) -> list[Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return [name for name in config["architectures"] if isinstance(name, str)]
    except (ValueError, RecursionError, KeyError, TypeError):
        return []


TARGET = Target("folders", seeds, mutate, check, most_s=8.0)
