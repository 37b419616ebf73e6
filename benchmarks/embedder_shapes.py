"""Write model folders with the sizes of published embedders and rerankers: `embedder_shapes.py OUT [NAME ...]`.

A folder has config.json and a tokenizer, and no weights: run it with `--load-format dummy`. vLLM reads
the same folders. `tiny` sizes are for a try on a CPU. The sizes are those of the checkpoints' config.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tiny_words import WORDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = {
    "bos_token": "[CLS]",
    "eos_token": "[SEP]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}
LABELS = ("no", "yes")  # tokens that Qwen3's rerankers answer with
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": list(LABELS),
    "is_original_qwen3_reranker": True,
}

_BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_XLMR = _BERT | {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 250002,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 2000}

CONFIGS = {"decoder": _QWEN3, "bert": _BERT, "xlmr": _XLMR, "reranker": _QWEN3}


def config_of(name: str, tiny: bool) -> dict[str, Any]:
    config = CONFIGS[name] | {"torch_dtype": "bfloat16", "initializer_range": 0.02}
    if tiny:
        config |= _SMALL | ({"num_key_value_heads": 1, "head_dim": 32} if "head_dim" in config else {})
    return config


def tokenizer_of(config: dict[str, Any]) -> Tokenizer:
    """Byte pairs of the words of embeddings_http.py: fewer tokens than the vocabulary, which texts of ids use whole."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(SPECIAL.values()))
    trainer = trainers.BpeTrainer(  # type: ignore[call-arg]
        vocab_size=900, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.add_tokens(list(LABELS))
    if config["model_type"] != "qwen3":
        ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if config["type_vocab_size"] > 1 else "[CLS] $A [SEP] [SEP] $B [SEP]"
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ids)
    return tokenizer


def write(out: Path, name: str, tiny: bool = False) -> Path:
    """The folder of a model of CONFIGS."""
    folder, config = out / f"{name}{'-tiny' if tiny else ''}", config_of(name, tiny)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_of(config).save(str(folder / "tokenizer.json"))
    limit = min(config["max_position_embeddings"], 32768) - (2 if name == "xlmr" else 0)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": limit, **SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help=", ".join(CONFIGS))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    for name in args.names or CONFIGS:
        print(write(args.out, name, args.tiny))


if __name__ == "__main__":
    main()
