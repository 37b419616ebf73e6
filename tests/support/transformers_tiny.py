"""A tiny random model for each of transformers' causal language models, and Quire's result with it.

`outcome` saves a model as a checkpoint, reads it with --model-impl transformers and compares it with transformers without any
cache: tokens of a batch, with prompts in chunks, and log-probabilities of a prompt. A model is equal, refused (with the
reason), or wrong, which must never happen.
"""

import json
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from inline_engine import InlineEngine
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.ipc.sampling import SamplingParams
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import parse_model_config
from quire.workers.models.transformers.skeleton import build_skeleton

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB, LAYERS = 256, 4
PROMPTS = (3, 29, 14, 1)  # lengths
NEW_TOKENS = 14
MODEL_OPTIONS = MappingProxyType({"model_impl": "transformers"})
MOST_PARAMETERS = 20_000_000
CHUNK = 16  # tokens of a step

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "sliding_window": 8, "n_embd": 64, "n_layer": 4,
    "n_head": 4, "n_positions": 256, "n_ctx": 256, "n_inner": 96, "d_model": 64, "num_layers": 4, "num_heads": 4,
    "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "num_experts_per_topk": 2, "moe_topk": 2, "moe_num_experts": 4,
    "moe_k": 2, "n_shared_experts": 1, "shared_expert_intermediate_size": 32, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "ffn_hidden_size": 96, "n_heads": 4, "n_layers": 4, "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "d_kv": 16, "rotary_dim": 8, "d_ff": 96,
    "embedding_size": 64, "first_k_dense_replace": 1, "expert_ffn_hidden_size": 32, "num_encoder_layers": 2,
    "num_decoder_layers": 4, "max_seq_len": 256, "query_pre_attn_scalar": 20, "attention_chunk_size": 64,
    "mlp_ffn_hidden_size": 96, "image_size": 32, "max_window_layers": 2, "layer_norm_eps": 1e-5,
}  # fmt: skip
DECODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod", "reformer", "qdqbert",
)  # fmt: skip
# where the small values above do not do
CHANGES: dict[str, dict[str, Any]] = {name: {"is_decoder": True} for name in DECODERS}
_PLAIN = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CHANGES |= {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 2.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n": {"num_kv_shared_layers": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_assistant": _PLAIN,
    "gemma4_unified_assistant": _PLAIN,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},  # as all that are published; by default there is none
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"num_hidden_layers": 54},
}
# without which transformers does not make their own default configs
BASES: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": _PLAIN},
    "gemma4_unified_assistant": {"text_config": _PLAIN},
}


class Outcome(NamedTuple):
    model: str  # the class, "" if there is none
    result: str  # "equal", "refused", "wrong", "untried"
    reason: str
    distinct: int = 0  # tokens among the outputs


def tiny_config(model_type: str) -> Any:
    """A small config; raises what transformers raises for one that cannot be."""
    cls = CONFIG_MAPPING[model_type]
    base = cls(**BASES.get(model_type, {}))
    text = base if model_type.startswith("musicgen") else base.get_text_config(decoder=True)
    if type(text) is cls:
        return cls(**{**_small(base), **CHANGES.get(model_type, {})})
    own = {**_small(text), **CHANGES.get(model_type, {})}
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type) == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]:
        return type(text)(**own)
    parts = {name: _small(getattr(base, name)) for name in base.sub_configs if getattr(base, name, None) is not None}
    for name in parts:
        if getattr(base, name) is text:
            parts[name] = own
    return cls(**{**_small(base), **parts})


def _small(base: Any) -> dict[str, Any]:
    """Fields of a config that have small values."""
    fields = base.to_dict()
    values = {name: value for name, value in SMALL.items() if name in fields and _takes(name, fields[name], value)}
    if "qk_rope_head_dim" in values and "head_dim" in fields:
        values["head_dim"] = values["qk_rope_head_dim"]
    if "qk_rope_head_dim" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := fields.get(name), list) and kinds:
            order = list(dict.fromkeys(kinds))
            values[name] = [order[i % len(order)] for i in range(LAYERS)]
    if "model_type" in fields:
        values["model_type"] = fields["model_type"]
    return values


def _takes(name: str, default: object, value: object) -> bool:
    return type(default) is type(value) or (default is None and name in ("head_dim", "num_key_value_heads"))


def tiny_model(config: Any) -> Any:
    """Of large random weights: small ones repeat a token whatever attention does."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    cls = classes[0] if isinstance(classes, tuple) else classes
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = cls._from_config(config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sink" in name:
                parameter.normal_(0.0, 0.4 if "gate.weight" in name or "router" in name else 0.2)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(0.0, 0.2)
    return model.eval()


def greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' tokens, each of a forward pass over all that precedes it."""
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(NEW_TOKENS):
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            outputs.append(ids[len(prompt) :])
    return outputs


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, VOCAB - 8, (length,), generator=generator).tolist() for length in PROMPTS]


def outcome(model_type: str) -> Outcome:
    """What becomes of a tiny model of this type."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    name = name if isinstance(name, str) else name[0]
    try:
        config = tiny_config(model_type)
        classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        name = (classes[0] if isinstance(classes, tuple) else classes).__name__
        fields = json.loads(config.to_json_string(use_diff=False))
    except Exception as error:  # transformers' own, of two hundred kinds
        return Outcome(name, "untried", f"no tiny model: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    try:
        read = parse_model_config({**fields, "architectures": [name]}, model_impl="transformers")
    except ModelConfigError as error:
        return Outcome(name, "refused", str(error).removeprefix("--model-impl transformers: "))
    skeleton = build_skeleton(read.transformers_config or "", torch.float32)
    if (size := sum(parameter.numel() for parameter in skeleton.parameters())) > MOST_PARAMETERS:
        return Outcome(name, "untried", f"no tiny model: it has {size} parameters")
    model = tiny_model(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            engine = InlineEngine(Path(folder), model_options=MODEL_OPTIONS, budget=CHUNK, max_model_len=128, block_size=16)
        except ModelConfigError as error:
            return Outcome(name, "refused", str(error).removeprefix("--model-impl transformers: "))
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        ours = [list(tokens) for tokens in engine.generate(prompts(), params)]
        longest = max(prompts(), key=len)
        engine.generate([longest], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        logprobs = torch.cat([row.logprobs for row in engine.prompt_rows])
    theirs = greedy(model, prompts())
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([longest]), use_cache=False).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(longest)[1:, None])[:, 0]
    if logprobs.shape != expected.shape or not torch.allclose(logprobs, expected, rtol=1e-3, atol=1e-3):
        return Outcome(name, "wrong", f"logprobs of a prompt are {logprobs.tolist()} for {expected.tolist()}")
    distinct = len({token for tokens in theirs for token in tokens})
    if ours == theirs:
        return Outcome(name, "equal", "", distinct)
    return Outcome(name, "wrong", f"{ours} for {theirs}", distinct)


def quiet() -> None:
    """No remarks of transformers on tiny models."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
