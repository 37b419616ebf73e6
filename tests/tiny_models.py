"""Small random models of every family, written as real checkpoint folders by transformers: what tests serve and compare with.

`tiny_model(name)` gives the folder of one of `ALL_MODELS`, made once per process and removed at its end; `reference(name)` the
transformers model that wrote it. Weights are large (std 0.2 and more) and seeded: with small ones a tied random model repeats
one token whatever attention does, and a test would see nothing. test_models.py holds them to that, and to the shapes that each
family is to have; the equality tests hold every output to 16 distinct tokens.
"""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tiny_families
import tiny_hybrids
import tiny_moe

VOCAB_SIZE = 512
MAX_POSITIONS = 512
BOS, EOS, IM_START, IM_END = 0, 1, 2, 3
SPECIAL_TOKENS = ["<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "A quire is a gathered set of pages. Twenty-four or twenty-five sheets make a quire, and twenty quires make a ream.",
    "The binder folds the sheets once, sews them through the fold, and presses the book under a board until it is dry.",
    "def gather(pages: list[int]) -> list[int]:\n    return sorted(set(pages))\n",
    '{"name": "quire", "pages": 24, "bound": true, "weight": 0.125}',
    "In the year 1234567890 the quick brown fox jumps over the lazy dog; Zwölf Boxkämpfer jagen Viktor über den Deich.",
    "What do you see? I see a page, and another page, and the thread that holds them together. 你好，世界。 Здравствуй.",
)

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.21,  # 0.2 and more in every matrix drawn
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

# name -> (family, what differs from BASE). Windows are short, so that a test of 48 tokens goes well beyond them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa-bias": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 64}),
    "llama-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 16, "head_dim": 32}),
    "mistral-tied-mha": (
        "mistral",
        {"sliding_window": None, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "mistral-linear": ("mistral", {"sliding_window": 24, "rope_parameters": LINEAR_ROPE}),
    "mistral-yarn": ("mistral", {"sliding_window": None, "rope_parameters": YARN_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen2-mixed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2, "num_hidden_layers": 4},
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {**YARN_ROPE, "rope_theta": 1000000.0}}),
    "qwen2-mha-linear": ("qwen2", {"num_key_value_heads": 4, "rope_parameters": LINEAR_ROPE}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 1}),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": {**YARN_ROPE, "rope_theta": 1000000.0}}),
    "qwen3-mixed": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}

ALL_MODELS = {**MODELS, **tiny_families.MODELS, **tiny_moe.MODELS, **tiny_hybrids.MODELS}
ALWAYS = {*MODELS, *tiny_families.FIRST, *tiny_moe.FIRST, *tiny_hybrids.FIRST}  # in every run; the others where there is time

# The same for a GPU, whose kernels are built for certain head sizes; and as transformers 5.17 and later ones read them alike.
HEAD_DIMS = {
    "llama": 64, "llama-mha": 80, "llama-mqa-bias": 96, "qwen2-mixed": 112, "mistral-sliding": 128, "qwen3": 256,
}  # fmt: skip
GPU_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    f"gpu-{name}": (
        family,
        tiny_families.with_heads(changes, HEAD_DIMS.get(name, ... if changes.get("head_dim") is ... else 64)),
    )
    for name, (family, changes) in {**MODELS, **tiny_moe.MODELS}.items()
} | tiny_families.GPU_MODELS
GPU_MODELS["gpu-olmoe"][1]["hidden_size"] = 256  # whose norms are of all heads, and so wide
GPU_MODELS["gpu-mimo-v2-bias"][1]["rope_parameters"] = {  # of heads of 64, an even number of elements
    kind: {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    for kind in ("full_attention", "sliding_attention")
}
GPU_MODELS["gpu-gpt-oss"][1]["swiglu_limit"] = 7.0  # what 5.17 takes whatever the config says

_WIDE = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "num_hidden_layers": 2, "initializer_range": 0.05,
}  # fmt: skip
# Wide enough for the kernels that a full batch of a real model gets.
WIDE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "wide-llama": ("llama", _WIDE),
    "wide-qwen3": ("qwen3", _WIDE),
    **tiny_moe.WIDE_MODELS,
}
# With a head that four ranks share by whole blocks of the sampler's, the last of them a short one.
_SPLIT = {"vocab_size": 1700}
SPLIT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "split-llama": ("llama", {**_SPLIT, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "split-mistral": ("mistral", {**_SPLIT, "sliding_window": 16}),
    "split-qwen2": ("qwen2", {**_SPLIT, **MODELS["qwen2-mixed"][1]}),
    "split-qwen3": ("qwen3", {**_SPLIT, "tie_word_embeddings": True}),
    "split-phi": ("phi", {**tiny_families.MODELS["phi"][1], **_SPLIT}),  # its head has a bias
    "split-cohere": ("cohere", {**tiny_families.MODELS["cohere"][1], **_SPLIT}),  # tied, and logits scaled
    "64-ids": ("llama", {"vocab_size": 64}),
    "split-gpu-llama": ("llama", {**_SPLIT, "num_key_value_heads": 1, "attention_bias": True, "head_dim": 64}),
}


@functools.cache
def tiny_model(name: str, max_shard_size: str = "1GB") -> Path:
    """Folder of `ALL_MODELS[name]`: config, float32 safetensors (sharded where max_shard_size is small), tokenizer."""
    folder = root() / f"{name}-{max_shard_size}"
    reference(name).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": [EOS, IM_END]}))
    return folder


@functools.cache
def reference(name: str) -> Any:
    """The transformers model of `MODELS[name]`, float32, eval mode, eager attention."""
    import torch

    family, changes = {**ALL_MODELS, **GPU_MODELS, **tiny_hybrids.GPU_MODELS, **WIDE_MODELS, **SPLIT_MODELS}[name]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(len(name) + sum(name.encode()))
        made_by = tiny_hybrids if family in tiny_hybrids.CLASSES else tiny_families
        model = made_by.make(family, {**BASE, **changes})
        for key, parameter in model.named_parameters():
            if family in tiny_hybrids.CLASSES and tiny_hybrids.vary(family, key, parameter):
                continue
            if key.endswith("sinks"):
                parameter.normal_(0.0, 1.0)
            elif key.endswith("proj_bias"):  # of all experts
                parameter.normal_(0.0, 0.25)
            elif key.endswith("bias"):  # transformers starts biases at 0: a model that forgot them would pass
                parameter.normal_(0.0, 0.2)
            elif key.endswith(("router.scale", "per_expert_scale")):
                parameter.normal_(1.0, 0.3)
            elif key.endswith("router.proj.weight"):  # Gemma 4's: its input is small
                parameter.normal_(0.0, 3.0)
            elif "norm" in key or ".ln_" in key:
                parameter.normal_(tiny_families.norm_mean(name, family, key), 0.2 if parameter.dim() == 1 else 0.3)
            elif key.endswith(("gate.weight", "router.weight")):  # of experts: far apart, so that rounding chooses no other
                parameter.normal_(0.0, 0.21 if family.startswith("mistral4") else 0.4)  # a flat softmax over its groups
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            elif key.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.2)
    return model


@functools.cache
def tokenizer() -> Any:
    """A byte-level BPE of VOCAB_SIZE tokens; the first four are SPECIAL_TOKENS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 4, trainer)
    return made


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, with a chat template."""
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


@functools.cache
def root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="quire-tiny-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
